"""MiniMax-M3 over topkv: the model is sparse by itself, in prompts too, and stays what it is."""

from __future__ import annotations

import pytest
import torch
from model_cases import model_of
from transformers import DynamicCache

import topkv
from topkv.errors import CapabilityError, ConfigError

FIRST, MORE, STEPS, BLOCK = 61, 11, 8, 8
NAME = "MiniMaxM3VL"

pytest.importorskip("topkv_trained_gate")


def make(tiny, topk=3, local=1, **options):
    """Four layers, two of them sparse; weights so large that a wrong block shows."""
    types = ["full_attention", "minimax_m3_sparse"] * 2
    sizes = {"index_block_size": BLOCK, "index_topk_blocks": topk, "index_local_blocks": local}
    return model_of(NAME, tiny.device, layer_types=types, **sizes, **options)


def talk(tiny, check, model, cache, chunk=None):
    """Two turns over one cache: the tokens, and logits of both."""
    ids, logits = tiny.prompt(FIRST)["input_ids"], []
    for _ in range(2):
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        sequences, made, _ = check.run(
            model, prompt, STEPS, past_key_values=cache, prefill_chunk_size=chunk
        )
        logits.append(made)
        ids, chunk = torch.cat([sequences, tiny.prompt(MORE, seed=1)["input_ids"]], 1), None
    return sequences, torch.cat(logits, 1)


@pytest.mark.parametrize("chunk", [None, 9])
@pytest.mark.parametrize(("topk", "local"), [(3, 1), (3, 2), (20, 1)])
def test_tokens_are_those_of_the_stock_model(tiny, check, topk, local, chunk):
    """The model selects 3 of 8 blocks, or all; topkv changes where keys and values are stored."""
    model = make(tiny, topk, local)
    sequences, logits = talk(tiny, check, model, DynamicCache(config=model.config), chunk)
    with topkv.attach(model, {"backend": "triton_attention", "max_tokens": 512}) as handle:
        sparse = [group.shape for group in handle.config.groups if group.algorithm]
        assert [(shape.layers, shape.unit) for shape in sparse] == [((1, 3), BLOCK)]
        assert sparse[0].select == topk - 1
        cache = handle.new_cache()
        ours = talk(tiny, check, model, cache, chunk)
        assert torch.equal(ours[0], sequences)
        assert (ours[1] - logits).abs().max() < 1e-4 * logits.abs().max()
        if topk == 3:
            assert handle.coordinator.transfers_of().misses > 0
        cache.close()
        check.all_free(handle)
    again = talk(tiny, check, model, DynamicCache(config=model.config), chunk)
    assert torch.equal(again[0], sequences)


def test_what_it_selects_shows(tiny, check):
    """A model with room for all blocks gives other logits."""
    few, all_of_them = (
        talk(tiny, check, model, DynamicCache(config=model.config))[1]
        for model in (make(tiny, 3), make(tiny, 20))
    )
    assert (few - all_of_them).abs().max() > 1e-2 * all_of_them.abs().max()


def test_rows_of_a_batch_are_those_alone(tiny, check):
    """Blocks of a row that is padded begin where its own tokens begin, as if it were alone."""
    model, pads = make(tiny), (0, 17, 1)
    batch = tiny.prompt(FIRST, pads)
    with topkv.attach(model, {"backend": "triton_attention", "max_tokens": 512}):
        together = check.run(model, batch, STEPS)[0]
        for row, pad in enumerate(pads):
            alone = {name: each[row : row + 1, pad:] for name, each in batch.items()}
            assert torch.equal(check.run(model, alone, STEPS)[0][0], together[row, pad:])


def test_dense_layers_have_no_index_to_select_by(tiny):
    with pytest.raises(ConfigError, match="layer 0 has no indexer"):
        topkv.attach(make(tiny), {"backend": "triton_attention", "dense_layers": []})


def test_an_index_that_projects_otherwise_is_refused(tiny, monkeypatch):
    model = make(tiny)
    index = model.model.layers[1].self_attn.indexer
    own = type(index).forward

    def turned(self, hidden, *further):
        return own(self, -hidden, *further)

    monkeypatch.setattr(type(index), "forward", turned)
    with pytest.raises(CapabilityError, match="its selection cannot be reproduced"):
        topkv.attach(model, {"backend": "triton_attention"})


def test_indexes_of_other_sizes_are_refused(tiny):
    model = make(tiny)
    model.model.layers[3].self_attn.indexer.topk_blocks = 5
    with pytest.raises(CapabilityError, match="indexes of the layers differ"):
        topkv.attach(model, {"backend": "triton_attention"})
    for layer in model.model.layers:
        layer.self_attn.indexer = None
    with pytest.raises(CapabilityError, match="no layer has an index"):
        topkv.attach(model, {"backend": "triton_attention"})
