"""``topkv calibrate double_sparsity`` against statistics that are recomputed in float64.

The oracle takes the inputs of each attention module, applies the weights of its projections and a
RoPE of its own, and knows nothing of how the command sees queries and keys.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from topkv_cli.group import topkv
from topkv_double_sparsity.calibration import read

transformers = pytest.importorskip("transformers")
checkpoint = pytest.importorskip("topkv_evaluation")

BLOCK = 48
TEXT = "".join(f"def item_{i}(x):\n    return x * {i * i} + {i}\n" for i in range(24))


def call(*args, **options):
    return CliRunner().invoke(topkv, ["calibrate", "double_sparsity", *map(str, args)], **options)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The shipped model with its first two layers, in float32: one that fp64 can be held to."""
    target = tmp_path_factory.mktemp("model")
    config = transformers.AutoConfig.from_pretrained(checkpoint.CHECKPOINT, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.CHECKPOINT, config=config, dtype=torch.float32
    )
    model.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.CHECKPOINT)
    tokenizer.save_pretrained(target)
    (target / "text").write_text(TEXT)
    return target


@pytest.fixture(scope="module")
def model(model_dir):
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokens(model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    return torch.tensor(tokenizer(TEXT)["input_ids"])


def rotated(x, theta):
    """RoPE of float64 ``[m, heads, D]`` at positions 0 .. m - 1, halves rotated as pairs."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def activations(model, blocks):
    """Float64 post-RoPE queries and keys of all blocks, by layer."""
    dim, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    seen = {}
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.setdefault(module.layer_idx, []).append(
                kwargs["hidden_states"][0].double().numpy()
            ),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        for block in blocks:
            model(block[None])
    for hook in hooks:
        hook.remove()
    result = {}
    for index, layer in enumerate(model.model.layers):
        weights = (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight)
        q, k = (
            np.concatenate(
                [
                    rotated((x @ w.detach().double().numpy().T).reshape(len(x), -1, dim), theta)
                    for x in seen[index]
                ]
            )
            for w in weights
        )
        result[index] = (q.reshape(len(q), k.shape[1], -1, dim), k)
    return result


def truth(q, k):
    return np.abs(q).mean(0).sum(1) * (k.max(0) - k.min(0))


@pytest.fixture(scope="module")
def spread(model, tokens):
    """Queries and keys of five blocks, spread over the text, by layer."""
    blocks = tokens.split(BLOCK)
    return activations(model, [blocks[i * len(blocks) // 5] for i in range(5)])


def test_the_file_holds_what_float64_says(model_dir, spread, tmp_path):
    out = tmp_path / "out.json"
    done = call(
        *("--model", model_dir, "--text", model_dir / "text"),
        *("--samples", 5, "--block", BLOCK, "--device", "cpu", "--output", out),
    )
    assert done.exit_code == 0, done.output
    found = read(out, [0, 1], 2, 64)
    assert f"{5 * BLOCK} tokens" in done.stderr
    for index, (q, k) in spread.items():
        assert np.allclose(found.layers[index], truth(q, k), rtol=2e-4)
        last = truth(q[-BLOCK:], k[-BLOCK:])
        assert not np.allclose(found.layers[index], last, rtol=2e-2), "the last block alone"


def test_a_short_text_is_used_whole(model_dir, model, tokens, tmp_path):
    out = tmp_path / "out.json"
    done = call(
        *("--model", model_dir, "--text", model_dir / "text", "--device", "cpu"),
        *("--block", 500, "--output", out),
    )
    assert done.exit_code == 0, done.output
    assert f"{len(tokens)} tokens" in done.stderr
    assert len(tokens) % 500
    for index, (q, k) in activations(model, tokens.split(500)).items():
        found = read(out, [0, 1], 2, 64).layers[index]
        assert np.allclose(found, truth(q, k), rtol=2e-4)


def test_the_model_is_left_as_it_was(model, tokens):
    from topkv_double_sparsity import collect

    before = model.config._attn_implementation
    with torch.no_grad():
        logits = model(tokens[None, :40]).logits
        collect.importance_of(model, [tokens[:40]])
        assert model.config._attn_implementation == before
        assert torch.equal(model(tokens[None, :40]).logits, logits)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model", "/nowhere", "--text", "TEXT"), "there is no such directory"),
        (("--model", "EMPTY", "--text", "TEXT"), "no model can be loaded"),
        (("--model", "MODEL", "--text", "/nowhere"), "cannot be read"),
        (("--model", "MODEL", "--text", "NOTHING"), "at least 2"),
        (("--model", "MODEL", "--text", "TEXT", "--block", "40000"), "32768 positions"),
        (("--model", "MODEL", "--text", "TEXT", "--device", "warp9"), "warp9"),
        (("--model", "MODEL", "--text", "TEXT", "--output", "/nowhere/x/y"), "--output"),
    ],
)
def test_what_cannot_be_done_is_refused(model_dir, tmp_path, args, words):
    (tmp_path / "nothing").write_text("")
    names = {
        "MODEL": model_dir,
        "TEXT": model_dir / "text",
        "EMPTY": tmp_path,
        "NOTHING": tmp_path / "nothing",
    }
    out = () if "--output" in args else ("--output", tmp_path / "out.json")
    device = () if "--device" in args else ("--device", "cpu")
    done = call(*(names.get(arg, arg) for arg in args), *out, *device)
    assert done.exit_code == 2, done.output
    assert "\nerror: " in "\n" + done.stderr
    assert words in done.stderr
    assert not (tmp_path / "out.json").exists()


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def spoil_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "None"}}')


def more_layers(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))


def other_shape(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 40}))


BAD = {
    truncate: "no model can be loaded",
    spoil_tokenizer: "no tokenizer can be loaded",
    more_layers: "model.layers.2.mlp.up_proj.weight: expected by config.json, missing",
    other_shape: "mlp.up_proj.weight: expected [40, ",
}


@pytest.mark.parametrize("damage", BAD)
def test_a_damaged_directory_is_refused(model_dir, tmp_path, damage):
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    damage(folder)
    args = ("--model", folder, "--text", model_dir / "text", "--device", "cpu")
    done = call(*args, "--output", tmp_path / "out.json")
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "error: " in done.stderr
    assert BAD[damage] in done.stderr
    assert str(folder) in done.stderr


FOREIGN = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()

class ForeignConfig(LlamaConfig):
    model_type = "topkv_foreign_calibrated"

class ForeignModel(LlamaForCausalLM):
    config_class = ForeignConfig
"""


def test_code_of_a_model_runs_only_if_it_is_allowed(model_dir, tmp_path, monkeypatch):
    # Transformers copies code that it runs here.
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "run")
    )
    folder, marker, out = (tmp_path / name for name in ("model", "it_ran", "out.json"))
    shutil.copytree(model_dir, folder)
    (folder / "foreign.py").write_text(FOREIGN.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "foreign.ForeignConfig",
        "AutoModelForCausalLM": "foreign.ForeignModel",
    }
    config["model_type"] = "topkv_foreign_calibrated"
    (folder / "config.json").write_text(json.dumps(config))
    text = ("--text", model_dir / "text", "--device", "cpu")
    args = ("--model", folder, "--output", out, *text)
    done = call(*args, input="y\ny\n")
    assert not marker.exists()
    assert (done.exit_code, done.stdout, out.exists()) == (2, "", False), done.output
    assert "--trust-remote-code" in done.stderr
    done = call(*args, "--trust-remote-code")
    assert (done.exit_code, marker.exists(), out.exists()) == (0, True, True), done.output


def test_the_file_decodes(model_dir, tmp_path, bench):
    from topkv_testing.tiers import tier

    out = tmp_path / "out.json"
    text = ("--text", model_dir / "text", "--device", "cpu")
    call("--model", model_dir, "--output", out, *text)
    assert set(json.loads(out.read_text())) == {"format", "kind", "layers", "ranges"}
    b = bench(tier("cpu"), dim=64, calibration=str(out), channels=8)
    b.prefill(0, b.case.tokens(0)[:20])
    assert all(len(lane) == 5 for lane in b.chosen(b.case.queries(1)[0]))
