"""Tokens that decoding attends, turn after turn, through hooks and the whole coordinator."""

from __future__ import annotations

import pytest
import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.errors import ConfigError, RequestError
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape
from topkv_snapkv.entry import topkv_register_algorithms
from topkv_testing.doubles import Entries
from topkv_testing.kit import params_of
from topkv_testing.oracle import attention
from topkv_testing.tiers import all_tiers
from topkv_testing.tolerance import assert_as_good

HEADS, KV_HEADS, DIM, MOST = 4, 2, 8, 96
MODEL = ModelShape(1, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
REGISTRY = PluginRegistry([("test", "1", Entries(*topkv_register_algorithms()))])
PARAMS = {"window": 4, "kernel": 3, "generated": 6}
CAP = 10


@pytest.fixture(
    params=[
        pytest.param(tier, id=tier.name, marks=[pytest.mark.gpu] if tier.name == "gpu" else [])
        for tier in all_tiers()
        if tier.name != "interpret"  # whole decodes take minutes there; the suite has the kernel
    ]
)
def tier(request):
    if request.param.missing:
        pytest.skip(request.param.missing)
    return request.param


def make(tier, longest=MOST, **params):
    config = SparseConfig(
        algorithm="snapkv",
        params={**PARAMS, **params},
        backend="gather",
        impl=tier.impl,
        budget=CAP + PARAMS["generated"] + 1,
        ring_tokens=8,
        page_tokens=8,
        max_requests=2,
        max_tokens=2 * MOST,
        max_request_tokens=longest,
        prefill_block_tokens=16,
        poison=True,
    )
    return SparseCoordinator(lower(config, MODEL, device=tier.device, registry=REGISTRY), REGISTRY)


class Chat:
    """One request, and every token that it was given."""

    def __init__(self, coordinator, seed=0):
        self.coordinator, self.slot = coordinator, coordinator.request_begin()
        self.device = coordinator.config.device
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
        """One token; its output, checked against attention over what each lane selected."""
        self.coordinator.forward_begin([self.slot])
        out = self._run(1)
        lanes = self.selected()
        for head, tokens in enumerate(lanes):
            tokens = [*tokens, self.length - 1]
            mine = slice(2 * head, 2 * head + 2)
            q = self.q[self.length - 1 : self.length, mine]
            k, v = (x[tokens, head : head + 1] for x in (self.k, self.v))
            truth = attention(q, k, v, MODEL.scale)[0]
            rough = (q @ k[:, 0].T * MODEL.scale).softmax(-1) @ v[:, 0]
            assert_as_good(out[:, mine], truth, rough, f"head {head}")
        return out, lanes

    def selected(self):
        ids = self.coordinator.lanes[0].selection.ids.tolist()
        for row in ids:
            valid = [i for i in row if i >= 0]
            assert valid == sorted(set(valid))
            assert row == valid + [-1] * (len(row) - len(valid))
            assert not valid or valid[-1] < self.length - 1
        return [[i for i in row if i >= 0] for row in ids]

    def kept(self):
        return self.coordinator.layers[0].view.pools["kept"][self.slot].tolist()


def oracle(chat, voters, length, cap=CAP):
    """The kept set of each lane from the full softmax of these queries, in float64."""
    window = range(length - PARAMS["window"], length)
    kept = []
    for head in range(KV_HEADS):
        votes = torch.zeros(length, dtype=torch.float64)
        for row in voters:
            logits = (
                chat.q[row, 2 * head : 2 * head + 2].double() @ chat.k[: row + 1, head].T.double()
            )
            votes[: row + 1] += (logits * MODEL.scale).softmax(-1).sum(0)
        front = votes[: window.start].tolist()
        spread = [max(front[max(i - 1, 0) : i + 2]) for i in range(len(front))]
        order = sorted(range(len(front)), key=lambda i: (-spread[i], i))
        kept.append(sorted([*order[: cap - len(window)], *window]))
    return kept


def test_decode_attends_the_kept_tokens_and_the_generated(tier):
    """The set never changes; a step attends it, every generated token, and itself."""
    chat = Chat(make(tier))
    chat.prefill(13, 2, 3, 22)
    expected = oracle(chat, range(36, 40), 40)
    for step in range(PARAMS["generated"]):
        lanes = chat.decode()[1]
        assert lanes == [lane + list(range(40, 40 + step)) for lane in expected]
        assert chat.kept() == expected


def test_past_its_room_it_refuses_or_slides(tier):
    refusing, sliding = (Chat(make(tier, outgrow=how)) for how in ("refuse", "slide"))
    for chat in (refusing, sliding):
        chat.prefill(40)
        for _ in range(6):
            chat.decode()
    with pytest.raises(RequestError, match="6 tokens after their prompt"):
        refusing.decode()
    kept = sliding.kept()
    for _ in range(5):
        last = sliding.length
        assert sliding.decode()[1] == [[*lane, *range(last - 6, last)] for lane in kept]


def test_a_prompt_within_the_cap_is_dense(tier):
    """The prompt leaves its free places to generated tokens, until the budget is spent."""
    for prompt in (1, 3, 4, 5, CAP):
        chat = Chat(make(tier, outgrow="slide"), seed=prompt)
        chat.prefill(prompt)
        while chat.length < CAP + PARAMS["generated"] + 1:
            lanes = chat.decode()[1]
            assert lanes == [list(range(chat.length - 1))] * KV_HEADS
        lanes = chat.decode()[1]
        first = prompt + 1  # the oldest generated token has to go
        assert lanes == [[*range(prompt), *range(first, chat.length - 1)]] * KV_HEADS


@pytest.mark.parametrize("outgrow", ["refuse", "slide"])
@pytest.mark.parametrize("params", [{}, {"window": 64, "generated": 300}], ids=str)
def test_a_budget_that_covers_the_longest_request_is_dense(tier, outgrow, params):
    """max_request_tokens below the budget leaves no less to the prompt than the budget did."""
    longest = 16  # one less than the budget, in whole pages
    for prompt in (1, CAP, CAP + 1, longest - 1):
        chat = Chat(make(tier, longest, outgrow=outgrow, **params), seed=prompt)
        chat.prefill(prompt)
        while chat.length < longest:
            lanes = chat.decode()[1]
            assert lanes == [list(range(chat.length - 1))] * KV_HEADS


def test_forks_and_reused_slots(tier):
    """A twin decodes what its origin would have; a slot's next request knows nothing of it."""
    coordinator = make(tier, outgrow="slide")
    chat, alone = Chat(coordinator), Chat(make(tier, outgrow="slide"))
    for one in (chat, alone):
        one.prefill(30)
        one.decode()
    twin = Chat(make(tier))  # its tensors, in another request of the first coordinator
    twin.coordinator, twin.slot, twin.length = coordinator, coordinator.fork(chat.slot), 31
    for _ in range(3):
        chat.q[chat.length], chat.k[chat.length] = 3.0, -1.0
        chat.decode()
        (out, lanes), (expected, same) = twin.decode(), alone.decode()
        assert lanes == same
        assert torch.equal(out, expected)
    coordinator.request_end(chat.slot)
    again, fresh = Chat(coordinator, seed=5), Chat(make(tier), seed=5)
    assert again.slot == chat.slot
    for one in (again, fresh):
        one.prefill(2, 21)
    assert again.decode()[1] == fresh.decode()[1]


class TestHooks:
    """One layer of the coordinator's, whose hooks are called by hand: turns and cuts."""

    @pytest.fixture
    def chat(self, tier):
        chat = Chat(make(tier, outgrow="slide"))
        chat.prefill(13, 27)
        chat.decode()
        return chat

    def settle(self, chat, length, first=0):
        path = chat.coordinator.layers[0]
        k, v = (x[first:length].to(chat.device) for x in (chat.k, chat.v))
        path.algorithm.settle(path.view, chat.slot, first, length, [(first, k, v)])
        return chat.kept()

    def construct(self, chat, start, end):
        path = chat.coordinator.layers[0]
        q, k, v = (x[start:end].to(chat.device) for x in (chat.q, chat.k, chat.v))
        seen = torch.arange(end) <= torch.arange(start, end)[:, None]
        keys = chat.k[:end]
        lse = attention(chat.q[start:end], keys, keys, MODEL.scale, seen)[1].float()
        path.algorithm.construct(path.view, chat.slot, start, k, v, q, lse.to(chat.device))

    def test_a_later_prompt_votes_anew_over_everything(self, chat):
        """Queries of the later prompt vote, as far as the window reaches; earlier ones do not."""
        assert chat.kept() == oracle(chat, range(36, 40), 40)
        self.construct(chat, 41, 43)  # the window reaches back to a query of the first prompt
        assert self.settle(chat, 43) == oracle(chat, range(41, 43), 43)
        self.construct(chat, 45, 47)
        assert self.settle(chat, 47) == oracle(chat, range(45, 47), 47)
        self.construct(chat, 50, 52)
        self.construct(chat, 52, 59)
        assert self.settle(chat, 59) == oracle(chat, range(55, 59), 59)

    def test_a_chunk_that_was_dropped_casts_no_votes(self, chat):
        self.construct(chat, 50, 52)
        self.construct(chat, 51, 53)
        assert self.settle(chat, 53) == oracle(chat, range(50, 53), 53)

    def test_a_prompt_that_lost_its_end(self, chat):
        """The voters that are left choose again; without any, what was kept stays."""
        before = self.settle(chat, 38)
        assert before == oracle(chat, range(36, 38), 38)
        after = [set(lane) for lane in self.settle(chat, 30)]
        for lane, then in zip(after, before, strict=True):
            assert set(range(26, 30)) <= lane
            assert {i for i in then if i < 26} <= lane
            assert len(lane) == CAP

    def test_ids_end_where_the_request_does(self, chat):
        """Tokens are taken back without a settle: nothing from the newest token on is selected."""
        path = chat.coordinator.layers[0]
        kept, step = chat.kept(), path.view.step
        for length in (42, 41, 40, 39, 37, 20, 1):
            step.lengths.fill_(length)
            path.lanes.selection.ids.fill_(-77)
            path.algorithm.retrieve_topk(path.view, chat.q[:1, None], None, path.lanes.room)
            expected = [[i for i in (*lane, 40, 41) if i < length - 1] for lane in kept]
            chat.length = length
            assert [
                [i for i in row if i >= 0] for row in path.lanes.selection.ids.tolist()
            ] == expected

    def test_part_of_the_history_is_refused(self, chat):
        with pytest.raises(ValueError, match="from position 0"):
            self.settle(chat, 41, first=40)


def test_turns_of_a_chat(tier):
    """Prompt, answer, prompt, answer, a prompt cut short: each settle votes over everything."""
    chat = Chat(make(tier))
    chat.prefill(40)
    for _ in range(5):
        chat.decode()
    chat.prefill(3, 9)
    lanes = chat.decode()[1]
    assert lanes == oracle(chat, range(53, 57), 57)
    chat.coordinator.rollback(chat.slot, 55)
    chat.length = 55
    assert chat.decode()[1] == oracle(chat, range(53, 55), 55)


def test_bytes_per_request():
    """The formula of the README, counted from tensors."""
    coordinator = make(all_tiers()[0])
    pools = coordinator.layers[0].view.pools
    window, lanes, width, item = 4, KV_HEADS, CAP, 4
    formula = window * (HEADS * (DIM * item + 4) + 4) + 4 * lanes * (width + 1) + 8
    assert sum(pool[0].numel() * pool.element_size() for pool in pools.values()) == formula
    specs = coordinator.layers[0].algorithm.spec().representations
    assert {spec.grain for spec in specs} == {"request"}
    assert sum(spec.bytes for spec in specs) == formula


def refused(match, **params):
    group = make(all_tiers()[0]).layers[0].view.group
    entry = topkv_register_algorithms()[0]

    def made():
        given = params_of(entry, {**PARAMS, **params})
        # Refused before it asks for a top-k.
        setup = AlgorithmSetup(MODEL, group, given, torch.device("cpu"), topk=pytest.fail)
        REGISTRY.create("algorithm", "snapkv", setup, "triton")

    with pytest.raises(ConfigError, match=match) as raised:
        made()
    return raised.value.reasons


def test_values_that_do_not_fit_are_refused_together():
    assert len(refused("budget", window=CAP)) == 1
    assert len(refused("budget", generated=300)) == 1
    wrong = {"window": 0, "kernel": 4, "generated": True, "outgrow": "grow"}
    assert len(refused("odd", sinks=1, **wrong)) == 5
