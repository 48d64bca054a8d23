"""``share``: layers that attend to what the layer before them has selected."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.errors import ConfigError
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MODEL,
    doubles,
    make_coordinator,
)
from topkv_testing.models.doubles import SCRIPTED
from topkv_testing.models.indexed import INDEXED
from topkv_testing.models.oracle import attention
from topkv_testing.models.stage_doubles import COMPLETE
from topkv_testing.tiers import tier

UNIT, PROMPT = 2, 21
DEEP = evolve(MODEL, num_layers=7)
ALL_SPARSE = {"0-": "scripted"}


def deep(**options):
    """Make a coordinator of seven sparse layers."""
    options = {"layers": ALL_SPARSE, "registry": doubles(COMPLETE)} | options
    return make_coordinator(tier("cpu"), model=DEEP, **options)


@pytest.mark.parametrize(
    ("share", "selecting"),
    [
        ("F", range(7)),
        ("FS", (0, 2, 4, 6)),
        ("FSSS", (0, 4)),
        ("FFSSSSS", (0, 1)),
        ("FSSSSSSSSS", (0,)),
    ],
)
def test_the_pattern_repeats_over_the_layers_with_equal_settings(share, selecting):
    coordinator = deep(share=share)
    (group,) = coordinator.config.groups
    assert group.selecting == tuple(selecting)
    pools = coordinator.manager.representations[0].pools
    assert all(len(pool) == len(group.selecting) for pool in pools.values())
    kept = [bool(path.selector.view.pools) for path in coordinator.layers]
    assert kept == [layer in group.selecting for layer in range(7)]
    coordinator.close()


def test_it_counts_the_layers_of_each_group_for_itself():
    layers = {"0-": "scripted", "2-4": {"share": "FSS"}, "6": {"buffer": 24}}
    coordinator = deep(share="FS", layers=layers)
    assert [group.selecting for group in coordinator.config.groups] == [(0, 5), (2,), (6,)]
    coordinator.close()


def life(share, **options):
    """Run decode steps; return outputs, their selections, and the coordinator."""
    coordinator = deep(share=share, **options)
    generator, outs, seen = torch.Generator().manual_seed(3), [], []
    keys = values = torch.empty(7, 0, KV_HEADS, DIM)
    slot = coordinator.request_begin()
    for count in (PROMPT, *[1] * 6):
        decode = count == 1
        q, k, v = (torch.randn(7, count, n, DIM, generator=generator)
                   for n in (HEADS, KV_HEADS, KV_HEADS))  # fmt: skip
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        closed = (keys.shape[1] - 1) // UNIT
        coordinator.forward_begin(
            **({"decode": [slot]} if decode else {"prefill": [(slot, count)]})
        )
        for layer, path in enumerate(coordinator.layers):
            if decode:
                ids = [torch.randperm(closed, generator=generator)[:3] for _ in range(2)]
                path.algorithm.next_ids[layer] = torch.stack(ids).int()
            out = coordinator.attention(layer, q[layer], k[layer], v[layer])
            if decode:
                chosen = path.lanes.selection.ids.clone()
                outs.append(out)
                seen.append(chosen)
                check(out, q[layer], keys[layer], values[layer], chosen)
        coordinator.forward_end()
        for path in coordinator.layers:
            path.algorithm.next_ids.clear()
    check_integrity(coordinator)
    coordinator.close()
    return torch.cat(outs), torch.stack(seen).unflatten(0, (-1, 7))


def check(out, q, keys, values, chosen):
    """Compare with attention over the selected units and the open one, in float64."""
    group, length = HEADS // KV_HEADS, len(keys)
    for lane, units in enumerate(chosen.tolist()):
        units = [*units, (length - 1) // UNIT]
        seen = torch.isin(torch.arange(length) // UNIT, torch.tensor(units))
        heads = slice(lane * group, lane * group + group)
        own = slice(lane, lane + 1)
        truth, _ = attention(q[:, heads], keys[seen, own], values[seen, own], DIM**-0.5)
        torch.testing.assert_close(out[:, heads].double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", ["FS", "FSSS"])
def test_layers_that_share_attend_to_the_selection_before_them(share):
    _, seen = life(share, scope="kv_head")
    period = len(share)
    for step in seen:
        for layer in range(7):
            assert torch.equal(step[layer], step[layer - layer % period])
        firsts = step[::period]
        assert not torch.equal(firsts[0], firsts[1])


def test_where_every_layer_selects_no_bit_changes():
    (one, ids), (two, again) = (life(share, scope="kv_head") for share in ("F", "FFF"))
    assert torch.equal(one, two)
    assert torch.equal(ids, again)


def refused(**options):
    with pytest.raises(ConfigError) as error:
        make_coordinator(tier("cpu"), **options)
    return "\n".join(error.value.reasons)


@pytest.mark.parametrize("share", ["", "SF", "FX", 4, ["F", "S"]])
def test_wrong_patterns_are_refused(share):
    reported = refused(share=share)
    assert "share must be a text of F and S that begins with F, such as 'FSSS', got" in reported


def test_what_shares_by_itself_and_what_needs_every_layer_is_refused():
    reported = refused(registry=doubles(INDEXED), algorithm=INDEXED.name, unit=1, share="FS")
    assert "which says itself which layers share, got 'FS' (layers 0,3)" in reported
    with pytest.raises(ConfigError, match="some layers share a selection"):
        deep(share="FS", stages=["complete"])


def test_an_entry_may_recommend_it():
    entry = evolve(SCRIPTED, name="sharing", defaults={"share": "FS"})
    coordinator = deep(registry=doubles(entry), layers={"0-": "sharing"}, algorithm="sharing")
    assert coordinator.config.groups[0].selecting == (0, 2, 4, 6)
    coordinator.close()
    assert LAYERS == 4
