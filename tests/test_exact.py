"""Exact verification: a draft that is accepted has the bits and the selection that its token has
without drafts, with any algorithm on any backend."""

from __future__ import annotations

import pytest
import torch
from attrs import astuple
from hypothesis import given
from hypothesis import strategies as st

from tests.test_matrix import Run, supported
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import examples

MOST, STEPS = 4, 3
STAGES = ["top_p", "head_sparsity", "residual", "regranulate"]


class Both:
    """Two requests of a coordinator, in steps that verify drafts or that append a token.

    Args:
        cell, on: what decodes.
        most: tokens that the first request can reach.
        drafts: rows append up to ``MOST`` tokens.
        options: of the configuration.
    """

    def __init__(self, cell, on, most, drafts, **options):
        many = {"max_queries": MOST, "verification": "exact"} if drafts else {}
        size = max(cell.unit, 16)
        room = {"max_requests": 2, "ring_tokens": None, "max_tokens": 2 * -(-most // size) * size}
        self.run = run = Run(cell, on, most, **room, **many, **options)
        self.coordinator, self.device = run.coordinator, on.device
        self.slots, self.lengths = [run.slot, self.coordinator.request_begin()], [0, 0]
        self.tensors = [run.q, run.k, run.v]
        if run.index:
            self.tensors += [part for part in astuple(run.index) if part is not None]
        self.noise = [torch.randn(x.shape).to(x.dtype) for x in self.tensors]

    def prefill(self, counts):
        for row, (slot, count) in enumerate(zip(self.slots, counts, strict=True)):
            self.coordinator.forward_begin(prefill=[(slot, count)])
            self.attention([tensor[:count] for tensor in self.tensors])
            self.coordinator.forward_end()
            self.lengths[row] = count

    def attention(self, tensors):
        q, k, v, *parts = (tensor.to(self.device) for tensor in tensors)
        v = k if self.run.model.attention == "mla" else v
        index = type(self.run.index)(*parts, *[None] * (3 - len(parts))) if parts else None
        return self.coordinator.attention(0, q, k, v, index).cpu()

    def step(self, appended, kept=None):
        """Append tokens of each row, of which ``kept`` are those of the request and the others
        drafts of something else; return the outputs and selections of each token that is kept."""
        queries = max(appended) if kept else 1
        kept = kept or appended
        rows = [slot if count else -1 for slot, count in zip(self.slots, appended, strict=True)]
        self.coordinator.forward_begin(rows, append=appended, queries=queries)
        packed = []
        for tensor, noise in zip(self.tensors, self.noise, strict=True):
            parts = [tensor.new_full((2, queries, *tensor.shape[1:]), torch.nan)]
            for row, (length, count, own) in enumerate(
                zip(self.lengths, appended, kept, strict=True)
            ):
                parts[0][row, :count] = noise[length : length + count]
                parts[0][row, :own] = tensor[length : length + own]
            packed.append(parts[0].flatten(0, 1))
        out = self.attention(packed).unflatten(0, (2, queries))
        lanes = self.coordinator.lanes[0]
        each = lanes.singles[:queries] if queries > 1 else [lanes]
        ids = [turn.selection.ids.cpu().unflatten(0, (2, -1)) for turn in each]
        self.coordinator.forward_end()
        for row, (slot, own) in enumerate(zip(self.slots, kept, strict=True)):
            self.lengths[row] += own
            if appended[row] > own:
                self.coordinator.rollback(slot, self.lengths[row])
        return [
            [(out[row, query], ids[query][row]) for query in range(own)]
            for row, own in enumerate(kept)
        ]

    def close(self):
        check_integrity(self.coordinator)
        self.coordinator.close()


def compare(cell, on, prompts, steps, **options):
    """Verify drafts beside steps of a token, and compare every token that is kept."""
    most = max(prompts) + MOST * len(steps) + 1
    drafted, plain = (Both(cell, on, most, drafts, **options) for drafts in (True, False))
    for both in (drafted, plain):
        both.prefill(prompts)
    for step in steps:
        got = drafted.step([count for count, _ in step], [kept for _, kept in step])
        for query in range(max(kept for _, kept in step)):
            wanted = plain.step([int(query < kept) for _, kept in step])
            for row, tokens in enumerate(wanted):
                for out, ids in tokens:
                    here, chosen = got[row][query]
                    assert torch.equal(chosen, ids), f"row {row}, query {query}"
                    assert torch.equal(here, out), f"row {row}, query {query}"
    drafted.close()
    plain.close()


STEP = st.lists(
    st.integers(1, MOST).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    min_size=2,
    max_size=2,
)


def cells():
    """Cells that are supported; of those that are interpreted, those of long units by night."""
    for each in supported():
        cell, on = each.values
        night = [pytest.mark.nightly] if on.name == "interpret" and cell.unit > 16 else []
        yield pytest.param(cell, on, id=each.id, marks=[*each.marks, *night])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("cell", "on"), [*cells()])
def test_a_draft_is_decoded_as_its_token_would_be(cell, on):
    @examples(on, cpu=4, interpret=1)
    @given(
        steps=st.lists(STEP, min_size=STEPS, max_size=STEPS),
        shift=st.integers(0, max(cell.unit, 4)),
    )
    def check(steps, shift):
        size = 12 * max(cell.unit, 4)
        params = {"params": {"window": 2, "generated": 16}} if cell.algorithm == "snapkv" else {}
        compare(cell, on, [size + shift, size // 2 + 1], steps, **params)

    check()
