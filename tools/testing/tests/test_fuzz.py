"""The fuzzer passes a correct engine, and names the seed of a wrong one."""

from __future__ import annotations

from functools import partial

import pytest

from topkv.plugins import registry
from topkv.plugins.discovery import hookimpl
from topkv.transfer.reference import ReferenceTransfer
from topkv_testing import fuzz
from topkv_testing.tiers import tier


@pytest.mark.parametrize("name", ["cpu", "interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_fuzz_passes(name):
    where = tier(name)
    if where.missing:
        pytest.skip(where.missing)
    steps, requests, calls = {
        "cpu": (6000, 32, 16),
        "interpret": (100, 4, 2),
        "gpu": (50_000, 64, 64),
    }[name]
    make = partial(registry().create, "transfer", "zero_copy")
    done = fuzz.fuzz(make, steps, where.device, where.impl, 11, requests, calls)
    assert done >= steps


class KeepsAStaleMap(ReferenceTransfer):
    """Reset leaves one unit in the map."""

    @hookimpl
    def reset(self, slot):
        kept = self.store.unit_slot[:, self.store.lanes_of(slot), 3].clone()
        super().reset(slot)
        self.store.unit_slot[:, self.store.lanes_of(slot), 3] = kept


class OffloadsOneUnit(ReferenceTransfer):
    """The last alone of several units that a row fills in a step goes to the host."""

    @hookimpl
    def offload(self):
        appended = self.step.appended
        self.step.appended = appended.clamp(max=1)
        super().offload()
        self.step.appended = appended


@pytest.mark.parametrize("broken", [KeepsAStaleMap, OffloadsOneUnit])
def test_fuzz_finds_a_bug_and_names_the_seed(monkeypatch, capsys, tmp_path, broken):
    class Plugins:
        def create(self, kind, name, setup, impl):
            return broken(setup)

    monkeypatch.setattr(fuzz, "registry", Plugins)
    log = tmp_path / "log"
    options = ["--impl", "reference", "--device", "cpu", "--requests", "8"]
    assert fuzz.main([*options, "--steps", "20000", "--seed", "4", "--log", str(log)]) == 1
    out = capsys.readouterr().out
    assert "1 violations" in out.splitlines()[-1]
    assert log.read_text() == out
    seed = out.split("reproduce with --seed ")[1].split()[0]
    assert fuzz.main([*options, "--steps", "1", "--seed", seed]) == 1
