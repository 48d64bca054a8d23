"""Whole decodes through the coordinator: dense where all fits, and both stages after drops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from plugins.rocketkv.tests import formulas
from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape
from topkv_rocketkv.entry import topkv_register_algorithms
from topkv_testing.decodes import MOST as LONGEST
from topkv_testing.decodes import DecodeTests
from topkv_testing.doubles import Entries
from topkv_testing.fixtures import on as on
from topkv_testing.oracle import attention
from topkv_testing.tiers import all_tiers
from topkv_testing.tolerance import assert_as_good

HEADS, KV_HEADS, DIM, MOST, UNIT = 4, 2, 8, 96, 2
MODEL = ModelShape(1, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
REGISTRY = PluginRegistry([("test", "1", Entries(*topkv_register_algorithms()))])
SELECT, PROMPT, READ = 6, 24, 5
PARAMS = {"window": 4, "kernel": 3, "prompt_budget": PROMPT, "channels": READ}


@st.composite
def shapes(draw):
    """unit, scope, parameters: prompts that are kept whole, whose selections are nested."""
    params = {"channels": draw(st.sampled_from([2, 5, 8])), "prompt_budget": LONGEST}
    return draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(["kv_head", "shared"])), params


class TestDecode(DecodeTests):
    (entry,) = topkv_register_algorithms()
    shapes = staticmethod(shapes)


@pytest.fixture(
    params=[
        pytest.param(tier, id=tier.name, marks=[pytest.mark.gpu] if tier.name == "gpu" else [])
        for tier in all_tiers()
    ]
)
def tier(request):
    if request.param.missing:
        pytest.skip(request.param.missing)
    return request.param


class Chat:
    """One request, and every token that it was given."""

    def __init__(self, tier, seed=0, **params):
        config = SparseConfig(
            algorithm="rocketkv",
            params={**PARAMS, **params},
            backend="gather",
            impl=tier.impl,
            unit=UNIT,
            budget=(SELECT + 1) * UNIT,
            ring_tokens=8,
            page_tokens=8,
            max_requests=2,
            max_tokens=2 * MOST,
            max_request_tokens=MOST,
            prefill_block_tokens=16,
            poison=True,
        )
        lowered = lower(config, MODEL, device=tier.device, registry=REGISTRY)
        self.coordinator = SparseCoordinator(lowered, REGISTRY)
        self.slot, self.device = self.coordinator.request_begin(), tier.device
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(MOST, HEADS, DIM, generator=generator) * 2
        self.k, self.v = torch.randn(2, MOST, KV_HEADS, DIM, generator=generator)
        self.length = 0

    def _run(self, count):
        rows = slice(self.length, self.length + count)
        tensors = [x[rows].to(self.device) for x in (self.q, self.k, self.v)]
        out = self.coordinator.attention(0, *tensors).cpu()
        self.coordinator.forward_end()
        self.length += count
        return out

    def prefill(self, *counts):
        for count in counts:
            self.coordinator.forward_begin(prefill=[(self.slot, count)])
            self._run(count)

    def decode(self):
        """The units that each kv-head selects; the output is checked against attention to them."""
        self.coordinator.forward_begin([self.slot])
        out = self._run(1)
        newest, closed = self.length - 1, (self.length - 1) // UNIT
        lanes = [
            [i for i in row if i >= 0] for row in self.coordinator.lanes[0].selection.ids.tolist()
        ]
        for head, units in enumerate(lanes):
            assert sorted(set(units)) == units
            tokens = [unit * UNIT + i for unit in units for i in range(UNIT)]
            tokens += range(closed * UNIT, self.length)
            mine = slice(2 * head, 2 * head + 2)
            q = self.q[newest : self.length, mine]
            k, v = (x[tokens, head : head + 1] for x in (self.k, self.v))
            truth = attention(q, k, v, MODEL.scale)[0]
            rough = (q @ k[:, 0].T * MODEL.scale).softmax(-1) @ v[:, 0]
            assert_as_good(out[:, mine], truth, rough, f"head {head}")
        return lanes


def kept(chat, end, voters):
    """The units that each kv-head keeps of a prompt of ``end`` tokens."""
    lanes = []
    for head in range(KV_HEADS):
        heads = chat.q[list(voters), 2 * head : 2 * head + 2]
        keys = chat.k[:end, head : head + 1].expand(-1, 2, -1)
        mass = formulas.votes(heads, keys, MODEL.scale, min(voters))
        front = formulas.pooled(mass[: end - PARAMS["window"]], PARAMS["kernel"])
        best = formulas.top(front, PROMPT - PARAMS["window"])
        lanes.append({i // UNIT for i in (*best, *range(end - PARAMS["window"], end))})
    return lanes


def selected(chat, lanes, end, read=READ):
    """Units that the newest token selects, of those that are kept and all that came since."""
    closed = (chat.length - 1) // UNIT
    found = []
    for head, held in enumerate(lanes):
        units = sorted({*held, *range(end // UNIT, closed)} & {*range(closed)})
        keys = chat.k[: closed * UNIT, head].unflatten(0, (closed, UNIT))[units]
        q = chat.q[chat.length - 1, 2 * head : 2 * head + 2]
        shares = formulas.scores(q, keys, read).softmax(-1).mean(0).tolist()
        found.append(sorted(units[i] for i in formulas.top(shares, SELECT)))
    return found


def test_steps_select_among_what_is_kept_and_what_came_since(tier):
    """Both stages of the paper, from a prompt in chunks to a step, in float64."""
    chat = Chat(tier)
    chat.prefill(13, 2, 3, 42)
    lanes = kept(chat, 60, range(56, 60))
    assert any(len(lane) < 30 for lane in lanes), "nothing was dropped: nothing is shown"
    later = set()
    for _ in range(12):
        got = chat.decode()
        assert got == selected(chat, lanes, 60)
        later |= {unit for lane in got for unit in lane if unit >= 30}
    assert later, "no generated token was ever selected"


def test_turns_of_a_chat(tier):
    """Prompt, answer, prompt, answer, a prompt cut short: each settle votes over everything."""
    chat = Chat(tier)
    chat.prefill(50)
    for _ in range(5):
        chat.decode()
    chat.prefill(3, 9)
    assert chat.decode() == selected(chat, kept(chat, 67, range(63, 67)), 67)
    chat.coordinator.rollback(chat.slot, 65)
    chat.length = 65
    assert chat.decode() == selected(chat, kept(chat, 65, range(63, 65)), 65)


def test_a_fork_goes_on_as_its_origin(tier):
    """The next request of a slot knows nothing of the last."""
    chat, twin = Chat(tier), Chat(tier)
    chat.prefill(60)
    twin.coordinator, twin.slot = chat.coordinator, chat.coordinator.fork(chat.slot)
    twin.length = 60
    lanes = kept(chat, 60, range(56, 60))
    twin.q[60:], twin.k[60:] = -twin.q[60:], 3 * twin.k[60:]
    for _ in range(4):
        assert chat.decode() == selected(chat, lanes, 60)
        assert twin.decode() == selected(twin, lanes, 60)
    chat.coordinator.request_end(chat.slot)
    again = Chat(tier, seed=5)
    again.coordinator, again.slot = chat.coordinator, chat.coordinator.request_begin()
    assert again.slot == chat.slot
    again.prefill(20)
    assert again.decode() == selected(again, [set(range(10))] * KV_HEADS, 20)


def test_the_budget_splits_itself(tier):
    """Sizes follow from the length of each prompt without a prompt budget and channels."""
    split = {"prompt_budget": None, "channels": None, "generated": 4}
    chat = Chat(tier, **split)
    chat.prefill(80)
    # t = 28, c = 2.857, share 0.2909: 58 tokens less 4; c2 = 2.07 and 7 of 8 channels.
    dropped = chat.coordinator.layers[0].view.pools["dropped"][chat.slot]
    state = chat.coordinator.layers[0].view.pools["state"][chat.slot]
    chat.decode()
    assert int(state[1]) == DIM - 7
    for lane in dropped.tolist():
        units = 40 - sum(lane)
        assert 54 / UNIT <= units < 40, "54 tokens lie in as many units and some more"


def test_bytes_per_request_and_token():
    """The formulas of the README, counted from tensors."""
    chat = Chat(all_tiers()[0])
    pools, window, item = chat.coordinator.layers[0].view.pools, PARAMS["window"], 4
    of_request = sum(p[0].nbytes for name, p in pools.items() if name != "bounds")
    queries = window * (HEADS * (DIM * item + 4) + 4)
    assert of_request == queries + KV_HEADS * MOST // UNIT + 8
    assert pools["bounds"][0].nbytes == UNIT * KV_HEADS * (2 * DIM * item // UNIT)
