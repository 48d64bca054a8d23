"""Calibration files against queries that projections give, before RoPE has seen them."""

from __future__ import annotations

import json
import re

import pytest
import torch

from topkv.errors import CapabilityError, ConfigError
from topkv_triattention import collect
from topkv_triattention.calibration import FORMAT, read, write

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 4096, "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | {
    "original_max_position_embeddings": 1024
}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1024,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
}  # fmt: skip


def model_of(kind, **sizes):
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def text():
    return torch.randint(1, 64, (90,), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def tokens():
    return text()


@torch.no_grad()
def projected(model, blocks):
    """Float64 pre-RoPE queries ``[m, H, D]`` by layer, out of the projections."""
    seen = {}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, args, out, at=at: seen.setdefault(at, []).append(out[0].double())
        )
        for at, layer in enumerate(model.model.layers)
    ]
    for block in blocks:
        model(block[None])
    for hook in hooks:
        hook.remove()
    return {at: torch.cat(each).unflatten(1, (4, 16)) for at, each in seen.items()}


HALVES = [(i, i + 8) for i in range(8)]
CASES = {
    "llama": ("Llama", {}, HALVES),
    "yarn": ("Llama", {"rope_parameters": YARN}, HALVES),
    "neighbours, half of the channels": ("Glm", {}, [(2 * i, 2 * i + 1) for i in range(8)]),
}


@pytest.mark.parametrize("case", CASES)
def test_queries_are_those_of_the_projections(case, tokens, tmp_path):
    kind, sizes, pairs = CASES[case]
    model, blocks = model_of(kind, **sizes), [*tokens.split(32)]
    write(tmp_path / "queries.json", collect.collect(model, blocks))
    known = read(tmp_path / "queries.json", [0, 1], 4, 16)
    rotary = model.model.rotary_emb
    omega = rotary.inv_freq.double()
    factor = rotary.attention_scaling
    assert (factor != 1) == (case == "yarn")
    for layer, q in projected(model, blocks).items():
        found = known[layer]
        assert {*map(tuple, found.pairs)} == {*pairs}
        assert found.frequencies == [*omega.tolist(), *[0.0] * (8 - len(omega))]
        mean = factor * q.mean(0)
        torch.testing.assert_close(torch.tensor(found.mean).double(), mean, rtol=0, atol=2e-5)
        a, b = (q[..., [pair[side] for pair in found.pairs]] for side in (0, 1))
        size = factor * (a**2 + b**2).sqrt().mean(0)
        torch.testing.assert_close(torch.tensor(found.size).double(), size, rtol=0, atol=2e-5)


def test_frequencies_that_change_with_length_are_refused(tokens):
    model = model_of("Llama", rope_parameters=LONG)
    with pytest.raises(CapabilityError, match="queries of layer 0 at positions from") as caught:
        collect.collect(model, [tokens])
    assert len(caught.value.reasons) == 2


def test_the_model_is_left_as_it_was(tokens):
    model = model_of("Llama")
    before = model.config._attn_implementation
    with torch.no_grad():
        logits = model(tokens[None]).logits
        collect.collect(model, [tokens])
        assert model.config._attn_implementation == before
        assert torch.equal(model(tokens[None]).logits, logits)


def test_a_text_becomes_a_file(tmp_path, capsys):
    evaluation = pytest.importorskip("topkv_evaluation")
    (tmp_path / "text").write_text("def key(x):\n    return x\n" * 8)
    args = ["--model", str(evaluation.CHECKPOINT), "--text", str(tmp_path / "text")]
    out = tmp_path / "queries.json"
    collect.main([*args, "--output", str(out), "--block", "64", "--device", "cpu"])
    assert "queries of 6 layers over 200 tokens" in capsys.readouterr().out
    assert sorted(read(out, range(6), 8, 64)) == [*range(6)]
    (tmp_path / "text").write_text("")
    for wrong, why in ((args, "no token"), (["--model", "/none", *args[2:]], "no such directory")):
        with pytest.raises(ConfigError, match=why):
            collect.main([*wrong, "--output", str(out), "--device", "cpu"])


def test_weights_that_are_missing_are_refused(tmp_path):
    """Transformers would make them up."""
    model_of("Llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError) as caught:
        collect.load(tmp_path, "cpu")
    assert "model.layers.2.self_attn.q_proj.weight is missing" in caught.value.reasons


def wrong(**changes):
    layer = {"pairs": [[0, 1], [2, 3]], "frequencies": [1.0, 0.1]}
    layer |= {"mean": [[1.0] * 4] * 2, "size": [[1.0] * 2] * 2}
    return {"format": FORMAT, "layers": {"0": layer | changes}}


@pytest.mark.parametrize(
    ("content", "reasons"),
    [
        ([], ["must hold an object"]),
        ({"format": "x", "layers": []}, ["format must be", "layers must be an object"]),
        ({"format": FORMAT, "layers": {}}, ["layers \\[0\\] are missing"]),
        (wrong(pairs=[[0, 1], [1, 2]]), ["layer 0: pairs must hold each channel"]),
        (wrong(pairs=[[0, 1, 2], [3]]), ["layer 0: pairs must hold each channel"]),
        (wrong(pairs=[[0, 1], [2, 3], []]), ["layer 0: pairs must hold each channel"]),
        (wrong(pairs=None), ["layer 0: pairs must hold each channel"]),
        (wrong(frequencies=[1.0]), ["frequencies must have 2 numbers .* got 1"]),
        (wrong(mean=[[1.0] * 4]), ["mean must be a list of 2 query heads, got 1"]),
        (wrong(size=[[1.0, float("nan")]] * 2, mean=3), ["mean must be", "size must have finite"]),
    ],
)
def test_wrong_files_are_refused_with_all_reasons(content, reasons, tmp_path):
    (tmp_path / "queries.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "queries.json", [0], 2, 4)
    assert len(caught.value.reasons) == len(reasons)
    for told, pattern in zip(caught.value.reasons, reasons, strict=True):
        assert re.search(pattern, told), told
