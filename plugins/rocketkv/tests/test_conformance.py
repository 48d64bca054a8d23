"""RocketKV against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from plugins.rocketkv.tests import formulas
from topkv_rocketkv.entry import topkv_register_algorithms
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv_testing.kit import examples

(ENTRY,) = topkv_register_algorithms()

PAGE_UNITS = 4
"""Units of a page in every case: the pool that ``by_key`` gets does not say it."""


def by_key(name, pool):
    """Unpack bounds, which are packed by page: channels in front, units behind."""
    if name != "bounds":
        return pool
    heads, two, dim = pool.shape[1:]
    pages = pool.view(-1, heads, two, dim, PAGE_UNITS).permute(0, 4, 1, 2, 3)
    return pages.flatten(0, 1)


def dropped(bench, slot, kept):
    """bool ``[lane_heads, U]``: units of a prompt of which no token is kept, by the votes of its
    window over the keys, see ``formulas``.

    Which of votes that tie win nobody can say from outside: there the plugin is believed. Raises
    AssertionError where it has kept or dropped another unit.
    """
    group, model, length = bench.group, bench.model, bench._settled[slot]
    params = bench.params
    found = bench.pools["dropped"][slot].bool().cpu()
    front = length - params.window
    q, each = bench._prompt[front:length], bench.keys[slot][:length]
    each = each.repeat_interleave(model.group_size, 1)
    size = model.num_heads // group.lane_heads
    for lane, heads in enumerate(torch.arange(model.num_heads).split(size)):
        sure, perhaps = set(range(length)), set(range(length))
        if length > kept:
            mass = formulas.votes(q[:, heads], each[:, heads], model.scale, front)
            votes = torch.tensor(formulas.pooled(mass[:front], params.kernel))
            least = votes.sort(descending=True).values[kept - params.window - 1]
            near, window = 1e-5 * votes.max(), set(range(front, length))
            sure = window | set((votes > least + near).nonzero().flatten().tolist())
            perhaps = window | set((votes >= least - near).nonzero().flatten().tolist())
        held, may = ({token // group.unit for token in tokens} for tokens in (sure, perhaps))
        left = {unit for unit in range(-(-length // group.unit)) if not found[lane, unit]}
        assert held <= left <= may, f"kept are {left}, by the votes {held}, and of ties {may}"
    return found


def oracle(bench, slot, q):
    """Mean softmax over the units that were not dropped, channel by channel in plain Python."""
    group, model = bench.group, bench.model
    kept, count = bench.algorithm.sizes(bench._settled[slot])  # arithmetic, see test_split
    out = dropped(bench, slot, kept)
    closed = bench.selectable(slot)
    keys = bench.keys[slot][: closed * group.unit].double().unflatten(0, (closed, group.unit))
    scores = []
    for head, heads in enumerate(q[0].double().cpu().split(model.group_size)):
        size = heads.abs().sum(0).tolist()
        best = sorted(range(len(size)), key=lambda i: (-size[i], i))[:count]
        total = torch.zeros(len(heads), closed, dtype=torch.float64)
        for i in best:
            bound = keys[:, :, head, i]
            bound = bound.amax(1) if heads[:, i].sum() > 0 else bound.amin(1)
            total += heads[:, i, None] * bound
        part, whole = heads[:, best].abs().sum(1), heads.abs().sum(1)
        warmth = torch.where(part > 0, whole / part, 1.0).nan_to_num(1.0).sqrt()
        scores.append(total * warmth[:, None] * model.scale)
    per_lane = torch.stack(scores).unflatten(0, (group.lane_heads, -1)).flatten(1, 2)
    per_lane = per_lane.masked_fill(out[:, None, :closed], -torch.inf)
    return per_lane.softmax(-1).mean(1)


PARAMS = {
    "window": st.sampled_from([1, 3, 4]),
    "kernel": st.sampled_from([1, 3, 63]),
    "generated": st.sampled_from([0, 2]),
    "channels": st.sampled_from([None, 1, 3]),
}
OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(PARAMS),
    geometry={"page_units": (PAGE_UNITS,)},
    selects=(2, 3, 5),
    by_key=by_key,
    oracle=oracle,
)


@frozen
class Unsticky:
    """``RocketParams`` without ``sticky``."""

    window: int = 32
    kernel: int = 63
    generated: int = 256
    prompt_budget: int | None = None
    channels: int | None = None


class TestRocketKV(AlgorithmTests):
    """Prompt budgets are those of the split, so that prompts lose most of their tokens."""

    @pytest.fixture
    def plugin(self):
        """Entry without ``sticky``: its tests want any unit drawn, and dropped ones never are."""
        return evolve(ENTRY, parameters=Unsticky)

    @pytest.fixture
    def options(self):
        return OPTIONS

    def test_a_prompt_over_pages_of_another_computes_its_tail_alone(self, subject):
        """The prompt keeps the units that it would keep if it had computed all of its tokens."""

        @examples(subject.tier, cpu=60, interpret=5, gpu=20)
        @given(case=cases(subject), data=st.data())
        def check(case, data):
            alone, over = (AlgorithmBench(subject, case, requests=1) for _ in range(2))
            keys = case.tokens(0)[: data.draw(alone.long_lengths() | alone.lengths(least=2))]
            most = max(len(keys) - alone.spec.prompt_tail, 0)
            shared = data.draw(st.just(most) | st.integers(0, most))
            alone.prefill(0, keys)
            over._hold(0, keys[:shared])
            over.prefill(0, keys[shared:])
            for name in ("dropped", "state"):
                assert torch.equal(over.pools[name], alone.pools[name]), name

        check()


@pytest.mark.slow
class TestWholePrompts(AlgorithmTests):
    """Prompts are kept whole: the plugin then selects like any other algorithm."""

    @pytest.fixture
    def plugin(self):
        traits = (*ENTRY.capabilities.traits, "attends", "low_ties", "incremental")
        return evolve(ENTRY, capabilities=evolve(ENTRY.capabilities, traits=traits))

    @pytest.fixture
    def options(self):
        params = {**PARAMS, "prompt_budget": st.just(10**6)}
        return evolve(OPTIONS, params=st.fixed_dictionaries(params), selects=(1, 2, 3, 5))
