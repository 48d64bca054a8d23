"""Representations follow the keys through chunks, decode, rollback, reuse, moves and forks.

Part of the algorithm suite.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.differences import require_same
from topkv_testing.kit import Data, KitTests, Subject, drawn


def assert_same(
    subject: Subject, first: AlgorithmBench, second: AlgorithmBench, slot: int, what: str
) -> None:
    """Assert that two benches agree on a slot: in bits where the entry states it, else in ids."""
    if "exact_update" in subject.entry.capabilities.traits:
        require_same(first.stored(slot), second.stored(slot), what)
    q = first.case.queries(2)
    one, two = (lanes(bench.retrieve(q[:1], [slot])) for bench in (first, second))
    assert one == two, f"{what}: selected are {one}, expected {two}"


class StateTests(KitTests):
    """One request from its first to its last token, and those after it."""

    kind = "algorithm"

    @drawn(cpu=80, interpret=6, gpu=20, traits=["exact_update"], case=partial(cases, exact=False))
    def test_decode_builds_what_a_prompt_builds(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """At once, in chunks, token by token: the same bits."""
        once, chunks, steps = (AlgorithmBench(subject, case, requests=1) for _ in range(3))
        length = data.draw(once.long_lengths() | once.lengths(least=2))
        keys = case.tokens(0)[:length]
        cuts = data.draw(st.lists(st.integers(1, length - 1), min_size=1, max_size=3))
        head = max(1, length - data.draw(st.integers(1, 2 * case.geometry.unit)))
        once.prefill(0, keys, settle=False)
        chunks.prefill(0, keys, cuts, settle=False)
        steps.prefill(0, keys[:head], settle=False)
        for key in keys[head:]:
            steps.update(steps.stage([0], key[None]))
        expected = once.stored(0)
        require_same(chunks.stored(0), expected, f"chunks that end at {cuts}")
        require_same(steps.stored(0), expected, f"decode from {head}")

    @drawn(cpu=60, interpret=8, gpu=20, case=cases)
    def test_chunks_of_a_prompt_do_not_matter(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """A prompt in chunks selects what it selects at once, where pages can be shared."""
        once, chunks = (AlgorithmBench(subject, case, requests=1) for _ in range(2))
        if once.spec.prefix != "pages":
            pytest.skip(f"{subject.entry.name}: spec() says prefix is not pages")
        length = data.draw(once.long_lengths() | once.lengths(least=2))
        cuts = data.draw(st.lists(st.integers(1, length - 1), min_size=1, max_size=3))
        once.prefill(0, case.tokens(0)[:length])
        chunks.prefill(0, case.tokens(0)[:length], cuts)
        assert_same(subject, chunks, once, 0, f"chunks that end at {cuts}")

    @drawn(cpu=60, interpret=5, gpu=20, case=cases)
    def test_full_pages_do_not_depend_on_what_follows(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Full pages depend on no later token and no query; a prefix cache relies on that."""
        one = AlgorithmBench(subject, case, requests=1)
        two = AlgorithmBench(subject, case, requests=1, prompt_salt=61)
        if one.spec.prefix != "pages":
            pytest.skip(f"{subject.entry.name}: spec() says prefix is not pages")
        kept = [pool.name for pool in one.spec.representations if pool.grain == "request"]
        reported = "belong to a request, and spec() says prefix='pages' without a prompt_tail"
        assert not kept or one.spec.prompt_tail, f"{kept} {reported}"
        length, other = data.draw(one.lengths()), data.draw(one.lengths())
        page = case.geometry.page_tokens
        shared = min(length, other) // page * page
        one.prefill(0, case.tokens(0)[:length])
        two.prefill(0, case.tokens(0)[:shared])
        two.extend(0, case.tokens(9)[shared : max(other, shared)][:3])
        what = f"the first {shared} tokens are the same, their representations are not"
        require_same(two.stored(0, shared), one.stored(0, shared), what)

    @drawn(cpu=60, interpret=8, gpu=20, case=cases)
    def test_moved_page_takes_its_representations_along(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """A page copied to another host page, and the old one overwritten: the same ids."""
        bench = AlgorithmBench(subject, case)
        length = data.draw(bench.long_lengths())
        bench.prefill(0, case.tokens(0)[:length])
        q = case.queries(1)
        before = lanes(bench.retrieve(q, [0]))
        page = data.draw(st.integers(0, (length - 1) // case.geometry.page_tokens))
        bench.copy_page(0, page, 0, poison=True)
        after = lanes(bench.retrieve(q, [0]))
        assert after == before, f"page {page} moved: selected are {after}, expected {before}"

    @drawn(cpu=40, interpret=2, gpu=20, case=cases)
    def test_fork_is_a_request_of_its_own(self, subject: Subject, case: Case, data: Data) -> None:
        """A twin selects what its origin does, and both go on as if there were no other."""
        bench = AlgorithmBench(subject, case)
        length = data.draw(bench.long_lengths(most=case.most - 3))
        bench.prefill(0, case.tokens(0)[:length])
        bench.fork(0, 2)
        q = case.queries(2)
        ids = lanes(bench.retrieve(q[:1].expand(2, -1, -1, -1), [0, 2]))
        assert ids[0] == ids[1], f"the origin selects {ids[0]}, its twin {ids[1]}"
        more = {0: case.tokens(8)[:3], 2: case.tokens(9)[:3]}
        for step in range(3):
            bench.append([2, 0], torch.stack([more[2][step], more[0][step]]))
        for slot in (0, 2):
            alone = AlgorithmBench(subject, case)
            alone.prefill(slot, case.tokens(0)[:length])
            alone.extend(slot, more[slot])
            assert_same(subject, bench, alone, slot, f"slot {slot} after a fork")

    @drawn(cpu=40, interpret=2, gpu=20, case=cases)
    def test_a_second_prompt_of_a_twin_leaves_the_other_its_pages(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """A twin reads on and settles: full pages, which both have, keep their bytes."""
        bench, page = AlgorithmBench(subject, case), case.geometry.page_tokens
        assume(case.most > page)
        length = data.draw(bench.lengths(least=page))
        bench.prefill(0, case.tokens(0)[:length])
        bench.fork(0, 2)
        before, q = bench.stored(0), case.queries(1)
        chosen = lanes(bench.retrieve(q, [0]))
        more = data.draw(st.integers(1, case.most - length))
        bench.prefill(2, case.tokens(8)[:more])
        what = f"{more} tokens more in a fork of a request of {length}, which is written too"
        require_same(bench.stored(0), before, what)
        after = lanes(bench.retrieve(q, [0]))
        assert after == chosen, f"{what}: selected are {after}, before {chosen}"

    @drawn(cpu=60, interpret=3, gpu=20, case=cases)
    def test_reused_slot_and_pages_hold_nothing_old(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """A request in a slot and on pages that another one left."""
        used, fresh = (AlgorithmBench(subject, case) for _ in range(2))
        old, new = (data.draw(used.long_lengths(most=case.most - 2)) for _ in range(2))
        used.prefill(1, case.tokens(0)[:old] * 2)
        used.append([1], case.tokens(8)[:1])
        used.retrieve(case.queries(1, salt=60), [1])
        used.end(1)
        for bench in (used, fresh):
            bench.prefill(1, case.tokens(1)[:new])
        assert_same(subject, used, fresh, 1, "after reuse")
        for bench in (used, fresh):
            bench.extend(1, case.tokens(9)[:2])
        assert_same(subject, used, fresh, 1, "after reuse and two steps")

    @drawn(cpu=80, interpret=4, gpu=20, case=partial(cases, units=(1, 2, 4, 8)))
    def test_rejected_tokens_leave_nothing(self, subject: Subject, case: Case, data: Data) -> None:
        """Tokens taken back, and others in their place: as if they had never been."""
        used, fresh = (AlgorithmBench(subject, case, requests=2) for _ in range(2))
        unit = case.geometry.unit
        prompt = data.draw(used.lengths(most=case.most - 2 * unit - 2))
        reach = (case.ring - 1) * unit
        rejected = data.draw(st.integers(1, min(reach, case.most - prompt - 1)))
        # The tail of what remains is still in the ring.
        assume((prompt - 1) // unit > (prompt + rejected - 1) // unit - case.ring)
        period = used.spec.settle_period
        assume(period is None or 2 * rejected < period)
        room = used.spec.generated
        assume(room is None or rejected < room)
        for bench in (used, fresh):
            bench.prefill(1, case.tokens(1)[:prompt])
        used.extend(1, case.tokens(0)[:rejected] * 2)
        used.rollback(1, prompt)
        q = case.queries(1)
        one, two = (lanes(bench.retrieve(q, [1])) for bench in (used, fresh))
        assert one == two, f"{rejected} tokens taken back: selected are {one}, not {two}"
        again = data.draw(st.integers(1, min(rejected + 1, case.most - prompt)))
        for bench in (used, fresh):
            bench.extend(1, case.tokens(9)[:again])
        assert_same(subject, used, fresh, 1, f"{rejected} tokens rejected, {again} written")

    @drawn(cpu=6, interpret=1, gpu=2, case=partial(cases, keys=("normal",)))
    def test_an_instance_remembers_nothing(self, subject: Subject, case: Case, data: Data) -> None:
        """Prompts, steps and selections of requests that come and go, in any order: each selects
        what it would if nobody else had ever called this instance."""
        calls = 8 if subject.tier.name == "interpret" else 40
        bench = AlgorithmBench(subject, case)
        most, room = case.most - 1, bench.spec.generated
        # Of how many tokens the prompt was.
        prompts = dict.fromkeys(range(bench.requests), 0)
        drawn = st.lists(st.integers(0, 7), min_size=calls, max_size=calls)
        for number, call in enumerate(data.draw(drawn, "calls")):
            slot = number % bench.requests
            length, keys = len(bench.keys[slot]), case.tokens(number % 48)
            generated = length - prompts[slot]
            if call == 0 or not length:
                bench.end(slot)
                prompts[slot] = most - number % min(most, 5)
                bench.prefill(slot, keys[: prompts[slot]])
            elif call < 3 and length < most and (room is None or generated < room):
                bench.append([slot], keys[:1])
            alone, held = AlgorithmBench(subject, case), bench.keys[slot]
            alone.prefill(slot, held[: prompts[slot]])
            alone.extend(slot, held[prompts[slot] :])
            q = case.queries(1, salt=50 + call)
            got, expected = (lanes(each.retrieve(q, [slot]))[0] for each in (bench, alone))
            assert got == expected, (
                f"call {number} of an instance selects {got}, alone it would {expected}"
            )
