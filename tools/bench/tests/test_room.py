"""Checks of memory before weights are made: who takes too much of a container is killed."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from topkv.config import SparseConfig
from topkv_bench import geometry, room
from topkv_bench.contestants import NAMES, Cell, Expected, expected
from topkv_bench.room import Room, weights_of
from topkv_cli.group import topkv
from topkv_cli.memory import HostMemory

CPU = torch.device("cpu")
GIB = 1 << 30
SPARSE = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "unit": 16}
SETS = [word for name, value in SPARSE.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture
def left(monkeypatch):
    """Sets the memory that is left of a control group."""

    def leave(size):
        found = HostMemory(64 * GIB, size, size, "of the control group /a")
        monkeypatch.setattr(room, "host_memory", lambda: found)

    return leave


def call(*args):
    return CliRunner().invoke(topkv, ["bench", "--device", "cpu", *SETS, *map(str, args)])


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_made(left, monkeypatch):
    left(24 * GIB)
    monkeypatch.setattr(geometry, "build", pytest.fail)
    done = call("--model", "llama-3.1-8b", "--contestants", "dense,topkv")
    assert done.exit_code == 2
    reported = " ".join(done.stderr.split())
    assert "no cell of LlamaForCausalLM in float32 fits cpu" in reported
    assert "dense 32768 x 1: it needs at least 37.9 GiB (weights 29.9 GiB, caches 8.0" in reported
    assert "topkv 32768 x 1: it needs at least 38." in reported
    assert "24.0 GiB of memory of the control group /a are free" in reported


def test_settings_are_judged_before_weights_are_made(monkeypatch):
    monkeypatch.setattr(geometry, "build", pytest.fail)
    done = call("--model", "llama-3.1-8b", "--set", "algorithm=nonsense")
    assert done.exit_code == 2
    assert "unknown algorithm 'nonsense'" in done.stderr


def test_cells_that_fit_are_measured_beside_those_that_do_not(left, tmp_path):
    row = 4 * 2 * 2 * 64 * 4  # layers, keys and values, kv-heads, dim, bytes
    skeleton = geometry.skeleton(geometry.config_of("tiny", None, 8192), torch.float32)
    left(weights_of(skeleton) + 1000 * row)
    few = ("--steps", 1, "--warmup", 1, "--context", "64,4096", "--fill", "pool")
    done = call("--model", "tiny", "--contestants", "dense", *few)
    assert done.exit_code == 0, done.stderr
    small, large = done.stderr.splitlines()[-2:]
    assert "tokens/s" in small
    assert "dense 4096 x 1: out of memory: it needs at least" in large


def test_a_skeleton_has_the_bytes_of_the_model():
    config = geometry.config_of("tiny", None, 1024)
    bare, model = geometry.skeleton(config, CPU_DTYPE), geometry.build(config, CPU, CPU_DTYPE)
    assert weights_of(bare) == weights_of(model)
    assert all(parameter.is_meta for parameter in bare.parameters())
    for name in NAMES:
        cell = Cell(name, 256, 2, 4, True, 0.15, SparseConfig(**SPARSE))
        assert expected(bare, cell, CPU) == expected(model, cell, CPU)


CPU_DTYPE = torch.bfloat16
SIZES = st.integers(0, 4 * GIB)


@given(SIZES, SIZES, SIZES, SIZES, st.none() | SIZES)
def test_what_fits_is_what_there_is_room_for_on_each_tier(weights, device, host, there, free):
    lack = Room(CPU, HostMemory(8 * GIB, there), free).lack(weights, Expected(device, host))
    if free is None:
        assert (lack is None) == (weights + device + host <= there)
    else:
        assert (lack is None) == (weights + device <= free and host <= there)
