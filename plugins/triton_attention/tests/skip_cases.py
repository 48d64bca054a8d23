"""Rule of ``skip_softmax`` in float64, and inputs of which some blocks matter little."""

from __future__ import annotations

import math

import torch
from attrs import field, frozen
from hypothesis import assume
from hypothesis import strategies as st

from topkv_testing.backend.bench import Expected, expect, joined
from topkv_testing.backend.cases import AttendCase, AttendInputs
from topkv_testing.backend.queries import with_queries
from topkv_testing.strategies import Geometry

TILE, SCALE = 16, 0.2
NEAR = 1e-4
"""A vote that is closer than this to the threshold, over the largest logit, may go either way."""


@frozen
class Kept:
    """Tokens of one kv-head of one lane that the rule keeps.

    Attributes:
        tokens: bool ``[length]``.
        skipped: blocks that are left out, of each split.
        margin: by how much the closest vote is clear of the threshold.
    """

    tokens: torch.Tensor
    skipped: list[int]
    margin: float


def kept(q, k, threshold, splits=1, tile=TILE, scale=SCALE, sight=None):
    """The rule as it reads, block by block, in float64.

    Args:
        q: ``[G, D]`` query heads of a kv-head, of all queries of a row.
        k: ``[length, D]`` keys in the order of the table.
        threshold: lambda, at most 1.
        splits, tile: of the lane, and keys of a block.
        scale: of the logits.
        sight: ``[G]`` tokens that each sees; None for all.
    """
    length = len(k)
    sight = torch.full((len(q),), length) if sight is None else sight
    seen = torch.arange(length) < sight[:, None]
    logits = (q.double() @ k.double().T * scale).masked_fill(~seen, -math.inf)
    blocks = -(-length // tile)
    run = -(-blocks // splits) * tile
    tokens, skipped, margin = torch.zeros(length, dtype=torch.bool), [0] * splits, math.inf
    for split in range(splits):
        top = torch.full((len(q),), -math.inf, dtype=torch.float64)
        end = min(split * run + run, length)
        for first in range(split * run, end, tile):
            block = slice(first, min(first + tile, end))
            votes = seen[:, block].any(1)
            if not votes.any():
                skipped[split] += 1
                continue
            peak = logits[:, block].amax(1)
            rise = float((peak - top)[votes].max())
            top = torch.maximum(top, peak)
            below = float((peak - top)[votes].max()) - math.log(threshold)
            margin = min(margin, rise if below == 0 else abs(below))
            if below < 0:
                skipped[split] += 1
            else:
                tokens[block] = True
    clear = margin / max(1.0, float(logits[seen].abs().max())) if seen.any() else math.inf
    return Kept(tokens, skipped, clear)


@frozen(eq=False)
class SkipCase:
    """Inputs of one call of ``attend`` with the option.

    Attributes:
        inputs: of the call.
        contexts: length of the request of each row.
        factor: of the option.
        splits: of each lane.
        each: what is kept, by lane and kv-head.
    """

    inputs: AttendInputs = field(repr=False)
    contexts: list[int]
    factor: float
    splits: int
    each: list[list[Kept]] = field(repr=False)

    @property
    def most(self):
        """Queries of a row, padding among them."""
        return self.inputs.q.shape[1]

    def expected(self) -> Expected:
        """Attention over what is kept: of each lane, kv-head and query ``[G, D]``."""
        parts = []
        for lane, heads in enumerate(self.each):
            k, v = self.inputs.listed(lane)
            q = self.inputs.q[lane].nan_to_num().unflatten(1, (len(heads), -1))
            for head, found in enumerate(heads):
                pick = slice(head, head + 1)
                pair = (x[found.tokens, pick] for x in (k, v))
                mask = found.tokens.nonzero()[:, 0] < sight(self.inputs, lane)[:, None]
                parts.append(expect(q[:, head], *pair, SCALE, mask))
        return joined(parts)

    def poison(self):
        """Turn values of tokens that are left out into NaN and infinity."""
        _, values = self.inputs.views()
        for (where, place), heads in zip(self.inputs.tokens, self.each, strict=True):
            for head, found in enumerate(heads):
                gone = ~found.tokens
                bad = torch.tensor([math.nan, math.inf]).repeat(len(gone))[: int(gone.sum())]
                values[where[gone], head, place[gone]] = bad[:, None].to(values.dtype)

    @property
    def counts(self):
        """int32 ``[N * kv-heads of a lane, splits]``."""
        return torch.tensor([found.skipped for heads in self.each for found in heads]).int()


def sight(inputs, lane):
    """Tokens that each query of a lane sees, ``[Q]``."""
    length, most = len(inputs.tokens[lane][0]), inputs.q.shape[1]
    count = 1 if inputs.queries is None else int(inputs.queries[lane // inputs.lane_heads])
    nth = torch.arange(most)
    return torch.where(nth < count, length - (count - 1 - nth), 0)


def make(
    geometry, lengths, contexts, factor, splits=1, seed=0, layout="buffer", sizes=(1.0,),
    queries=(), most=1,
):  # fmt: skip
    """A case whose blocks of keys are as large as ``sizes`` says, drawn for each; of ``most``
    queries a row, of which ``queries`` are no padding."""
    inputs = AttendCase(geometry, tuple(lengths), 2, layout, seed=seed).make()
    if most > 1:
        inputs = with_queries(inputs, list(queries), most)
    random = torch.Generator().manual_seed(seed)
    keys, _ = inputs.views()
    for where, place in inputs.tokens:
        count = -(-len(where) // TILE)
        size = torch.tensor(sizes)[torch.randint(len(sizes), (count,), generator=random)]
        grown = keys[where, :, place] * size.repeat_interleave(TILE)[: len(where), None, None]
        keys[where, :, place] = grown.to(keys.dtype)
    each = []
    for lane in range(len(lengths)):
        context = contexts[lane // geometry.lane_heads]
        q = inputs.q[lane].nan_to_num().unflatten(1, (keys.shape[1], -1))
        k, _ = inputs.listed(lane)
        threshold = min(1.0, factor / max(context, 1))
        seen = sight(inputs, lane).repeat_interleave(q.shape[2])
        each.append(
            [
                kept(q[:, h].flatten(0, 1), k[:, h], threshold, splits, sight=seen)
                for h in range(keys.shape[1])
            ]
        )
    return SkipCase(inputs, list(contexts), factor, splits, each)


@st.composite
def skip_cases(draw, dtypes=(torch.float32, torch.bfloat16, torch.float16), most=1):
    """Ragged batches with padded rows, of any dtype, scope and layout, and up to ``most`` queries
    a row."""
    scope = draw(st.sampled_from(["kv_head", "shared"]))
    unit = draw(st.sampled_from([1, 4, 16, 64]))
    dtype, group = draw(st.sampled_from(dtypes)), draw(st.sampled_from([1, 2, 3, 7]))
    geometry = Geometry(2, group, 64, unit, 1, scope, dtype)
    rows = draw(st.integers(1, 2))
    lanes = rows * geometry.lane_heads
    some = st.integers(0, 130) | st.sampled_from([0, 1, TILE, TILE + 1, 8 * TILE])
    lengths = draw(st.lists(some, min_size=lanes, max_size=lanes))
    contexts = draw(st.lists(st.integers(130, 5000), min_size=rows, max_size=rows))
    factor = draw(st.sampled_from([1e-3, 0.3, 10.0, 300.0, 1e9]))
    most = draw(st.integers(1, most))
    queries = draw(st.lists(st.integers(1, most), min_size=rows, max_size=rows))
    case = make(
        geometry, lengths, contexts, factor,
        splits=draw(st.sampled_from([1, 2, 5])), seed=draw(st.integers(0, 999)),
        layout=draw(st.sampled_from(["buffer", "pages", "apart"])),
        sizes=draw(st.sampled_from([(1.0,), (0.01, 1.0), (0.01, 0.5, 3.0, 30.0), (0.0, 1.0)])),
        queries=queries, most=most,
    )  # fmt: skip
    assume(all(found.margin > NEAR for heads in case.each for found in heads))
    return case
