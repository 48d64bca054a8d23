"""An attached DSA model is the stock model, at the budget that it was trained with."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from transformers import DynamicCache

from topkv_transformers.indexer import project, rotate_halves, rotate_neighbours, rotation_of

SINGLE, PADDED = (0,), (0, 21, 1)
BOTH = pytest.mark.parametrize("family", ["deepseek", "glm"])
EVERYTHING = 640


def in_float64(model):
    twin = copy.deepcopy(model).double()
    twin.config._experts_implementation = "eager"  # grouped products know no float64
    return twin


def oracle(check, model, prompt, steps, **options):
    """Tokens and logits of the stock model, and its logits in float64.

    Both must agree closely, or a selection or a route hangs on a rounding.
    """
    stock = check.run(model, prompt, steps, **options)
    truth = check.run(in_float64(model), prompt, steps, **options)
    assert torch.equal(stock[0], truth[0])
    assert (stock[1] - truth[1]).abs().max() < 1e-4 * truth[1].abs().max()
    return stock[0], stock[1], truth[1]


def compare(dsa, check, model, pads=PADDED, chunk=None, steps=12, stock=None, **settings):
    prompt, options = dsa.prompt(45, pads), {"prefill_chunk_size": chunk}
    tokens, logits, truth = oracle(check, stock or model, prompt, steps, **options)
    with dsa.attach(model, **settings) as handle:
        ours = check.run(model, prompt, steps, **options)
        assert torch.equal(ours[0], tokens)
        check.close(ours[1], logits, truth)
        ours[2].close()
        check.all_free(handle)


@pytest.mark.sampled(3)
@BOTH
@pytest.mark.parametrize("topk", [8, 16, EVERYTHING])
@pytest.mark.parametrize("chunk", [None, 9], ids=["whole", "chunks"])
@pytest.mark.parametrize("pads", [SINGLE, PADDED], ids=["single", "padded"])
def test_logits_are_those_of_the_stock_model(dsa, check, family, topk, chunk, pads):
    compare(dsa, check, dsa.model(family, index_topk=topk), pads, chunk)


@BOTH
def test_selection_shows_in_the_logits(dsa, check, family):
    """A selection changes logits, or the test above would say nothing."""
    prompt = dsa.prompt(45, SINGLE)
    few, all_ = (
        check.run(dsa.model(family, index_topk=topk), prompt, 1)[1] for topk in (8, EVERYTHING)
    )
    assert (few - all_).abs().max() > 0.01 * all_.abs().max()


@pytest.mark.parametrize("types", ["fsss", "ffsf"])
def test_other_ways_to_share(dsa, check, types):
    names = [{"f": "full", "s": "shared"}[letter] for letter in types]
    compare(dsa, check, dsa.model("glm", indexer_types=names))


@BOTH
def test_a_small_buffer_swaps(dsa, check, family):
    compare(dsa, check, dsa.model(family), steps=24, buffer=17, resident_fast_path=False)


@pytest.mark.parametrize("residency", ["resident", "streamed"])
@pytest.mark.parametrize("chunk", [None, 9], ids=["whole", "chunks"])
def test_dense_layers_attend_to_everything(dsa, check, residency, chunk):
    model = dsa.model("deepseek")
    stock = copy.deepcopy(model)
    stock.model.layers[1].self_attn.indexer.index_topk = EVERYTHING
    settings = {"dense_layers": [1], "dense_residency": residency}
    compare(dsa, check, model, chunk=chunk, stock=stock, **settings)


@BOTH
def test_scaled_rope(dsa, check, family):
    """YaRN changes the angles of both attentions, and the scale of the main one alone."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale_all_dim": 1.0}
    yarn |= {"mscale": 1.0, "original_max_position_embeddings": 80}
    model = dsa.model(family, rope_parameters=yarn)
    module = model.model.layers[0].self_attn
    assert module.scaling != module.qk_head_dim**-0.5
    compare(dsa, check, model)


def test_the_rope_of_an_indexer_is_that_of_its_module(dsa, check, monkeypatch):
    """DeepSeek's first release turned neighbours: a module that does so is followed."""
    model, glm = dsa.model("deepseek"), dsa.model("glm")
    first = model.model.layers[0].self_attn.indexer
    assert rotation_of(first) is rotate_halves
    assert rotation_of(glm.model.layers[0].self_attn.indexer) is rotate_neighbours
    file = sys.modules[type(first).__module__]
    monkeypatch.setattr(file, "apply_rotary_pos_emb", file.apply_rotary_pos_emb_interleave)
    assert rotation_of(first) is rotate_neighbours
    compare(dsa, check, model)


@BOTH
def test_scores_are_those_of_the_indexer(dsa, family, monkeypatch):
    """All scales are in the weights; a selection would not show that they are missing."""
    indexer = dsa.model(family).model.layers[0].self_attn.indexer
    x, q_resid = torch.randn(20, 64), torch.randn(20, 48)
    angles = torch.randn(20, 4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    scores, original = [], torch.Tensor.topk

    def topk(tensor, *args, **kwargs):
        scores.append(tensor)
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", topk)
    mask = torch.ones(1, 20, 20, dtype=torch.bool)
    indexer(x[None], q_resid[None], (cos[None], sin[None]), mask, None)
    with torch.no_grad():
        index = project(indexer, rotation_of(indexer), x, q_resid, cos, sin)
    dots = torch.relu(torch.einsum("thd,sd->ths", index.q.double(), index.k.double()))
    ours = torch.einsum("ths,th->ts", dots, index.weights.double())
    torch.testing.assert_close(ours.float(), scores[0][0], rtol=1e-4, atol=1e-4)
    assert index.weights.dtype is torch.float32


@BOTH
def test_bfloat16(dsa, check, family):
    """Logits are as good as the stock model's; all is selected: rounding may change a choice."""
    model = dsa.model(family, index_topk=EVERYTHING, first_k_dense_replace=9).bfloat16()
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.weights_proj.float()  # as checkpoints of GLM have it
    prompt = dsa.prompt(45, PADDED)
    with torch.no_grad():
        stock = model(**prompt).logits.double()
        truth = in_float64(model)(**prompt).logits
        with dsa.attach(model) as handle:
            ours = model(**prompt, past_key_values=handle.new_cache()).logits.double()
    real = prompt["attention_mask"].bool()
    error, known = ((each - truth)[real].abs().max() for each in (ours, stock))
    assert error <= 2 * known


@BOTH
@pytest.mark.parametrize("pads", [SINGLE, PADDED], ids=["single", "padded"])
def test_second_turn_fork_and_crop(dsa, check, family, pads):
    """The stock model goes on the same way from the same tokens."""
    model, first = dsa.model(family), dsa.prompt(30, pads)

    def talk(model, cache):
        sequences, _, cache = check.run(model, first, 9, past_key_values=cache)
        twin = copy.deepcopy(cache)
        cache.crop(-6)
        outputs = []
        for columns, each in ((sequences[:, :34], cache), (sequences[:, :39], twin)):
            ids = torch.cat([columns, dsa.prompt(13, (0,) * len(pads), 1)["input_ids"]], 1)
            mask = torch.nn.functional.pad(
                first["attention_mask"], (0, ids.shape[1] - 30), value=1
            )
            turn = {"input_ids": ids, "attention_mask": mask}
            outputs.append(check.run(model, turn, 8, past_key_values=each)[:2])
        return outputs

    exact = in_float64(model)
    stock = talk(model, DynamicCache(config=model.config))
    truth = talk(exact, DynamicCache(config=model.config))
    with dsa.attach(model, max_requests=6) as handle:
        ours = talk(model, handle.new_cache())
    for mine, theirs, right in zip(ours, stock, truth, strict=True):
        assert torch.equal(mine[0], theirs[0])
        check.close(mine[1], theirs[1], right[1])


@BOTH
@pytest.mark.parametrize("experts", ["batched_mm", "eager"])
def test_replayed_steps_are_those_of_python(dsa, check, recording, family, experts):
    """Experts one by one wait for the device: they cannot be recorded."""
    model, prompt = dsa.model(family), dsa.prompt(45, PADDED)
    model.config._experts_implementation = experts
    with dsa.attach(model, buffer=17, resident_fast_path=False):
        tokens, logits, _ = check.run(model, prompt, 12)
    with dsa.attach(model, buffer=17, resident_fast_path=False, **recording) as handle:
        if experts == "eager":
            with pytest.warns(RuntimeWarning, match="cannot be captured"):
                ours = check.run(model, prompt, 12)
        else:
            ours = check.run(model, prompt, 12)
        assert handle.capture.replayed == (10 if experts == "batched_mm" else 0)
    assert torch.equal(ours[0], tokens)
    assert torch.equal(ours[1], logits)
