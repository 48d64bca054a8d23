"""Contract with the core: hook names, and refusals with all their reasons."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from topkv.errors import ConfigError
from topkv.hooks.algorithm import Algorithm
from topkv.parameters import values
from topkv_double_sparsity.algorithm import DoubleSparsity
from topkv_double_sparsity.calibration import read, write
from topkv_double_sparsity.entry import topkv_register_algorithms
from topkv_testing.tiers import tier as tier_of

CPU = tier_of("cpu")


def test_one_instance_serves_the_hooks_by_their_names(bench):
    b = bench(CPU)
    for name in ("spec", "construct", "update", "retrieve_topk"):
        method = getattr(DoubleSparsity, name)
        parameters = inspect.signature(method).parameters
        assert list(parameters) == list(inspect.signature(getattr(Algorithm, name)).parameters)
        assert hasattr(method, "topkv_impl")
    with pytest.raises(ValueError, match="at most 1 queries a row"):
        b.algorithm.retrieve_topk(b.layer, torch.zeros(1, 2, 4, 16), None, torch.zeros(2, 5).int())


def test_entry_and_command_import_neither_torch_nor_triton():
    code = (
        "import sys, topkv_double_sparsity.entry, topkv_double_sparsity.commands\n"
        "print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_reference_imports_no_triton():
    code = (
        "import sys, topkv_double_sparsity.algorithm\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'triton'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_defaults(bench):
    (entry,) = topkv_register_algorithms()
    settings = bench(CPU, dim=128, **values(entry.parameters())).settings
    assert (settings.channels, settings.int4) == (64, True)
    assert settings.sinks == 0


def test_wrong_parameters_are_refused_together(bench):
    wrong = {
        "channels": 0,
        "label": "int8",
        "calibration": 3,
        "sink_tokens": -1,
        "colour": "red",
    }
    with pytest.raises(ConfigError) as raised:
        bench(CPU, **wrong)
    assert len(raised.value.reasons) == len(wrong)
    assert all(name in str(raised.value) for name in wrong)
    with pytest.raises(ConfigError) as raised:
        bench(CPU, channels=17, sink_tokens=6)
    assert len(raised.value.reasons) == 2


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"sink_tokens": 6}, "exceeds the 5 tokens"),
        ({"sink_tokens": True}, "sink_tokens"),
        ({"sticky": -0.5}, r"sticky of double_sparsity must be >= 0, got -0\.5"),
        ({"channels": 17}, "from 1 to head_dim = 16"),
        ({"calibration": "/nowhere/file.json"}, "cannot be read"),
    ],
)
def test_a_wrong_parameter_is_refused(bench, params, words):
    with pytest.raises(ConfigError, match=words):
        bench(CPU, **params)


GOOD = [[0.5] * 16] * 2


@pytest.mark.parametrize(
    ("layers", "further", "words"),
    [
        ({"1": GOOD}, {}, "layers \\[0\\] are missing"),
        ({"0": GOOD[:1]}, {}, "layer 0: expected 2 kv-heads of 16 channels"),
        ({"0": {}}, {}, "2 kv-heads"),
        ({"0": [[0.5] * 15] * 2}, {}, "16 channels"),
        ({"0": [[-1.0] + [0.5] * 15] * 2}, {}, "finite numbers of at least 0"),
        ({"0": [[float("nan")] * 16] * 2}, {}, "finite"),
        ({"0": [[True] * 16] * 2}, {}, "finite"),
        ({"0": [["1"] * 16] * 2}, {}, "finite"),
        ([], {}, "layers must be an object"),
        ({"0": GOOD}, {"format": "other"}, "format must be"),
        ({"0": GOOD}, {"kind": "channels"}, "kind must be"),
    ],
)
def test_a_bad_file_is_refused(bench, channel_file, layers, further, words):
    path = channel_file(layers, **further)
    with pytest.raises(ConfigError, match=words) as raised:
        bench(CPU, calibration=path)
    assert path in str(raised.value)


def test_all_that_is_wrong_with_a_file_is_reported(channel_file, tmp_path):
    path = channel_file({"0": [[1], GOOD[0]], "2": [GOOD[0]]}, kind="x", format="y")
    with pytest.raises(ConfigError) as raised:
        read(path, [0, 1, 2], 2, 16)
    assert len(raised.value.reasons) == 5
    for content, words in (("{", "no JSON"), ("[]", "must hold an object")):
        (tmp_path / "bad").write_text(content)
        with pytest.raises(ConfigError, match=words):
            read(tmp_path / "bad", [0], 2, 16)


def test_a_file_fixes_the_channels_and_lets_pages_be_shared(bench, tmp_path):
    path = tmp_path / "written.json"
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(2, 16, generator=generator)
    write(path, {0: rows.tolist(), 7: rows.tolist()}, {})
    b = bench(CPU, calibration=str(path), channels=5)
    assert b.spec.prefix == "pages"
    assert [spec.grain for spec in b.spec.representations] == ["token"]
    wanted = rows.double().topk(5).indices.sort().values
    assert torch.equal(b.chosen_channels(0), wanted)
