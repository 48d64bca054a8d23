"""Prompts of ``generate`` that take over what earlier ones left in the cache."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import topkv
from tests.machines.kept import keeping
from topkv.errors import CapabilityError, HostMemoryError
from topkv_testing.integrity import check_integrity

SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False}


def generated(model, ids, mask=None, steps=6, **options):
    """Sequences and logits of greedy ``generate``."""
    mask = torch.ones_like(ids) if mask is None else mask
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=steps,
        output_logits=True,
        return_dict_in_generate=True,
        **{"do_sample": False, **options},
    )
    logits = torch.stack(output.logits, 1)
    if "past_key_values" not in options:
        output.past_key_values.close()
    return output.sequences, logits


def close(ours, stock):
    """Other chunks round otherwise, and nothing else is different."""
    assert torch.equal(ours[0], stock[0])
    torch.testing.assert_close(ours[1], stock[1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("policy", "sparse"), [("prompt", {}), ("all", {}), ("prompt", SPARSE)], ids=str
)
def test_a_conversation_computes_what_is_new(tiny, policy, sparse):
    """Each turn passes everything that was said, as a chat does, over a cache of its own."""
    model, ids = tiny.model("qwen3"), tiny.prompt(70)["input_ids"]
    more = [tiny.prompt(n, seed=n)["input_ids"] for n in (5, 33, 17)]
    config = tiny.settings(**sparse, dense_layers=[1], max_requests=2)
    reported, found = [], []
    for pages in ("core", keeping(keep=policy)):
        turns, said = [], ids
        with topkv.attach(model, {**config, "pages": pages}) as handle:
            for further in more:
                turns.append(generated(model, said, steps=20))
                found.append(handle.prefixes.counts.found)
                said = torch.cat([turns[-1][0], further], 1)
            assert handle.coordinator.manager.host.used == 0
            check_integrity(handle.coordinator)
        reported.append(turns)
    for ours, stock in zip(*reported[::-1], strict=True):
        close(ours, stock)
    # Whole pages of 16: of 70 tokens 4; of 89, with 19 of 20 generated ones, 5; of 114 then 7.
    end = 80 if policy == "all" else 64
    assert found[:3] == [0, 0, 0]
    assert found[3:] == [0, end, end + (112 if policy == "all" else 80)]


def test_the_stock_model_where_the_budget_covers_everything(tiny):
    model, ids = tiny.model(), tiny.prompt(90)["input_ids"]
    stock = generated_by_stock(model, ids)
    with topkv.attach(model, tiny.settings(pages="prefixes")) as handle:
        for _ in range(3):
            close(generated(model, ids), stock)
        assert handle.prefixes.counts.found == 2 * 80
        assert handle.prefixes.counts.kept == 5


@pytest.mark.parametrize("algorithm", ["snapkv", "streaming_llm", "pariskv", "rocketkv"])
def test_every_algorithm_that_is_served_selects_as_without(tiny, algorithm):
    model, ids = tiny.model("qwen3", layers=3), tiny.prompt(150)["input_ids"]
    other = torch.cat([ids[:, :130], tiny.prompt(20, seed=9)["input_ids"]], 1)
    params = {"snapkv": {"window": 8, "generated": 24}, "rocketkv": {"window": 8}}.get(
        algorithm, {}
    )
    config = {**tiny.settings(**SPARSE, dense_layers=[0]), "algorithm": algorithm, "unit": 1}
    config |= {"params": params, "budget": 64, "buffer": 64}
    reported = []
    for pages in ("core", "prefixes"):
        with topkv.attach(model, {**config, "pages": pages}) as handle:
            generated(model, ids, steps=4)
            reported.append(generated(model, other, steps=20))
            found = handle.prefixes.counts.found
    assert found == 128
    close(reported[1], reported[0])


def generated_by_stock(model, ids, mask=None):
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        do_sample=False,
        max_new_tokens=6,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences, torch.stack(output.logits, 1)


def test_any_batches_of_prompts_that_begin_alike(tiny):
    """Left padding of any width, several sequences a prompt, rows that nothing is found for."""
    model, base = tiny.model(layers=1), tiny.prompt(60)["input_ids"][0].tolist()
    found = 0

    @settings(max_examples=6, deadline=None)
    @given(
        st.lists(
            st.lists(
                st.tuples(st.sampled_from([1, 15, 16, 17, 40, 60]), st.sampled_from([0, 3, 30])),
                min_size=1,
                max_size=3,
            ),
            min_size=2,
            max_size=4,
        ),
        st.sampled_from([1, 1, 2]),
    )
    def check(calls, several):
        nonlocal found
        several = several if max(map(len, calls)) < 3 else 1
        with topkv.attach(model, tiny.settings(pages=keeping(), max_requests=4)) as handle:
            for rows in calls:
                prompts = [base[:same] + [5] * other for same, other in rows]
                widest = max(map(len, prompts))
                ids = torch.tensor([[0] * (widest - len(each)) + each for each in prompts])
                mask = torch.tensor([[0] * (widest - len(p)) + [1] * len(p) for p in prompts])
                ids, mask = ids.to(model.device), mask.to(model.device)
                sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": several}
                ours = generated(model, ids, mask, **sampled)
                stock = copied.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=6,
                    **sampled,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
                close(ours, (stock.sequences, torch.stack(stock.logits, 1)))
            found += handle.prefixes.counts.found
            check_integrity(handle.coordinator)

    copied = copy.deepcopy(model)
    check()
    assert found > 100


def test_weights_that_change_make_all_be_forgotten(tiny):
    model, ids = tiny.model(), tiny.prompt(50)["input_ids"]
    with topkv.attach(model, tiny.settings(pages=keeping())) as handle:
        generated(model, ids)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight *= -1.5
        changed = generated(model, ids)
        assert handle.prefixes.counts.found == 0
        handle.prefixes.forget()
        close(generated(model, ids), changed)
        assert handle.prefixes.counts.found == 0
        close(generated(model, ids), changed)
        assert handle.prefixes.counts.found == 48


def test_calls_whose_keys_depend_on_more_are_computed(tiny):
    model, prompt = tiny.model(), tiny.prompt(50)
    ids = prompt["input_ids"]
    embeds = model.get_input_embeddings()(ids).detach()
    with topkv.attach(model, tiny.settings(pages=keeping())) as handle:
        for _ in range(2):
            model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=3)
            generated(model, ids, output_hidden_states=True)
            positions = torch.arange(7, 57, device=ids.device)[None]
            generated(model, ids, position_ids=positions, steps=1)
        hook = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: _[2] * 2)
        for _ in range(2):
            generated(model, ids)
        hook.remove()
        assert handle.prefixes.counts.asked == handle.prefixes.counts.kept == 0
        whole = generated(model, ids)
        close(generated(model, ids, prefill_chunk_size=16), whole)
        assert handle.prefixes.counts.found == 0


def test_what_was_kept_gives_way_to_requests(tiny):
    """A pool that one long prompt fills serves other prompts all the same."""
    model = tiny.model(layers=1)
    config = tiny.settings(pages=keeping(), max_tokens=160, max_requests=1)
    with topkv.attach(model, {**config, "max_request_tokens": 160}) as handle:
        for seed in range(4):
            generated(model, tiny.prompt(100, seed=seed)["input_ids"])
        counts = handle.prefixes.counts
        assert counts.evicted > 0
        with pytest.raises(HostMemoryError):
            generated(model, tiny.prompt(170)["input_ids"])
        close(
            generated(model, tiny.prompt(100, seed=3)["input_ids"]),
            generated_by_stock_of(tiny, model, tiny.prompt(100, seed=3)["input_ids"]),
        )
        assert handle.prefixes.counts.found == 96
        assert handle.coordinator.manager.host.used == 0


def generated_by_stock_of(tiny, model, ids):
    """Generate by a copy of a model that is attached."""
    stock = tiny.model(config=model.config, layers=1)
    stock.load_state_dict(model.state_dict())
    return generated_by_stock(stock, ids)


@pytest.mark.parametrize(
    ("algorithm", "params", "reason"),
    [
        ("clusterkv", {}, "clusterkv keeps more of a prompt than what stands in its pages"),
        ("double_sparsity", {}, "double_sparsity keeps more of a prompt"),
        ("pqcache", {}, "pqcache keeps more of a prompt"),
    ],
)
def test_algorithms_that_cannot_are_refused_by_name(tiny, algorithm, params, reason):
    config = {**tiny.settings(pages="prefixes"), "algorithm": algorithm, "params": params}
    config |= {"unit": 1} if algorithm != "quest" else {}
    model = tiny.model()
    with pytest.raises(CapabilityError, match="pages: prefixes cannot be served") as refused:
        topkv.attach(model, config)
    assert any(reason in each for each in refused.value.reasons)
    assert not hasattr(model.model, "_topkv_handle")


def test_rope_that_depends_on_the_length_is_refused(tiny):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny.model(rope_parameters=rope)
    with pytest.raises(CapabilityError, match="depend on the whole length"):
        topkv.attach(model, tiny.settings(pages=keeping()))


def test_tenants_find_their_own_prompts_alone(tiny):
    """Pages that are kept for a tenant stay within its quota; answers are the same as without."""
    model, ids = tiny.model("qwen3"), tiny.prompt(150)["input_ids"]
    config = tiny.settings(dense_layers=[1])
    with topkv.attach(model, config) as handle:
        stock = generated(model, ids)
        host = handle.coordinator.manager.host
        page, size = handle.config.page_tokens, host.bytes.numel() // host.num_pages
    config["pages"] = keeping(keep="prompt", quotas={"b": size})
    with topkv.attach(model, config) as handle:
        for name, found in (("a", 0), ("a", 149 // page * page), ("b", 0), ("b", page), ("", 0)):
            before = handle.prefixes.counts.found
            with handle.prefixes.tenant(name):
                close(generated(model, ids), stock)
            assert handle.prefixes.counts.found - before == found, name
        reported = handle.prefixes.counts.tenants
        kept = {name: (each.kept, each.kept_bytes) for name, each in reported.items()}
        whole = 150 // page
        assert kept == {"a": (whole, whole * size), "b": (1, size), "": (whole, whole * size)}
        assert reported["b"].evicted == 2 * (whole - 1)
        check_integrity(handle.coordinator)
