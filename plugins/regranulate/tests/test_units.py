"""Units of selected tokens: both implementations against Python's sets."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.hooks.stage import StageSetup  # noqa: E402
from topkv.types import GroupShape, ModelShape  # noqa: E402
from topkv_regranulate.kernels import RegranulateKernels  # noqa: E402
from topkv_regranulate.stage import Regranulate  # noqa: E402

NEEDS_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
CASES = [
    ("reference", "cpu"),
    pytest.param("reference", "cuda", marks=[pytest.mark.gpu, NEEDS_GPU]),
    pytest.param("triton", "cuda", marks=[pytest.mark.gpu, NEEDS_GPU]),
]
if not CUDA:
    CASES.append(("triton", "cpu"))
POISON = -7
MARGIN = 3


def expected(tokens, closed, unit, width):
    """The definition: the units of a lane, and how many of their tokens were not selected."""
    counted = {token for token in tokens if 0 <= token < closed * unit}
    units = sorted({token // unit for token in counted})
    return units + [-1] * (width - len(units)), unit * len(units) - len(counted)


def lengths_of(closed, unit, open_tokens=0):
    """Tokens of requests with these numbers of closed units; 0 of those that have none."""
    return [unit * units + 1 + open_tokens % unit if units else 0 for units in closed]


class Call:
    """Poisoned tensors of one call, each in a larger one whose margin must stay untouched."""

    def __init__(self, impl, device, requests, heads, select, units, unit, width):
        def full(dtype, *shape):
            return torch.full(shape, POISON, dtype=dtype, device=device)

        self.device, self.unit, self.width = device, unit, width
        lanes = requests * heads
        self.tokens = full(torch.int32, lanes, select + MARGIN)
        self.ids = full(torch.int32, lanes, width + MARGIN)
        self.extra = full(torch.int64, lanes + MARGIN)
        self.stage = made(impl, device, requests, heads, units, unit, width)

    def run(self, tokens, lengths, appended=None):
        """Call the stage; return lists of ids and extra tokens."""
        lanes, select = len(tokens), self.tokens.shape[1] - MARGIN
        self.tokens[:, :select] = torch.tensor(tokens, dtype=torch.int32).view(lanes, select)
        before = self.tokens.clone()
        self.stage.list_units(
            self.tokens[:, :select],
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            self.ids[:, : self.width],
            self.extra[:lanes],
            appended and torch.tensor(appended, dtype=torch.int32, device=self.device),
        )
        assert torch.equal(self.tokens, before), "wrote its candidates"
        assert (self.ids[:, self.width :] == POISON).all(), "wrote behind its row"
        assert (self.extra[lanes:] == POISON).all(), "wrote behind its lanes"
        return self.ids[:, : self.width].tolist(), self.extra[:lanes].tolist()

    def check(self, tokens, closed, open_tokens=0, appended=None):
        """Check that the call equals the definition, in every lane. Rows that append have one new
        token anyway, and more than one on top of ``closed`` and ``open_tokens``."""
        lengths = lengths_of(closed, self.unit, open_tokens)
        if appended:
            lengths = [
                length and length + max(new, 1) - 1
                for length, new in zip(lengths, appended, strict=True)
            ]
        ids, extra = self.run(tokens, lengths, appended)
        heads = len(tokens) // len(closed)
        for lane, row in enumerate(tokens):
            truth = expected(row, closed[lane // heads], self.unit, self.width)
            assert (ids[lane], extra[lane]) == truth, f"lane {lane}: {row}"


def made(impl, device, requests, heads, units, unit, width):
    """The stage of a group of ``heads`` lanes a request."""
    group = GroupShape(
        *((0,), unit, heads, 1, 8, torch.float32, unit),
        *(max(requests, 1), units, width, max(width, 1), 2),
    )
    model = ModelShape(1, heads, heads, 8, torch.float32, 1.0)
    kind = Regranulate if impl == "reference" else RegranulateKernels
    return kind(StageSetup(model, group, {}, torch.device(device)))


def selections(data, lanes, select, most):
    """Draw unique tokens in any order with -1 anywhere, close together or far apart."""
    rows = []
    for _ in range(lanes):
        token = st.integers(0, data.draw(st.sampled_from([3, 12, most])))
        row = data.draw(st.lists(token, max_size=select, unique=True))
        rows.append(data.draw(st.permutations(row + [-1] * (select - len(row)))))
    return rows


@pytest.mark.parametrize(("impl", "device"), CASES)
@given(st.data())
@settings(deadline=None, max_examples=40)
def test_any_selection(impl, device, data):
    unit = data.draw(st.sampled_from([2, 4, 16]))
    requests, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    select, units = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 12))
    width = min(select, units) + data.draw(st.integers(0, 2))
    call = Call(impl, device, requests, heads, select, units, unit, width)
    for open_tokens in (0, data.draw(st.integers(0, unit - 1))):
        closed = data.draw(st.lists(st.integers(0, units), min_size=requests, max_size=requests))
        tokens = selections(data, requests * heads, select, units * unit + 3)
        several = st.lists(st.integers(0, 4), min_size=requests, max_size=requests)
        call.check(tokens, closed, open_tokens, data.draw(st.none() | several))


@pytest.mark.parametrize(("impl", "device"), CASES)
@pytest.mark.parametrize("select", [1023, 1024, 1025, 2500])
def test_more_than_a_block(impl, device, select):
    """Selections and requests that one program walks in several blocks."""
    generator = torch.Generator().manual_seed(select)
    units, unit = 2100, 2
    call = Call(impl, device, 2, 1, select, units, unit, min(select, units))
    rows = [torch.randperm(units * unit, generator=generator)[:select].tolist() for _ in range(2)]
    call.check(rows, [units, 1030])


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_the_extremes_of_a_selection(impl, device):
    """Nothing, everything, one token of each unit, the edges of units and the open unit."""
    unit, units = 4, 8
    everything = list(range(32))
    call = Call(impl, device, 1, 1, 32, units, unit, units)
    pad = [-1] * 32
    for row, closed in (
        ([], units),
        (everything, units),
        (everything[::-1], 0),
        (everything, 7),
        (list(range(3, 32, 4)), units),
        ([0, 3, 4, 31, 28], units),
        ([28, 29], 7),
        ([27, 28], 7),
        ([2**31 - 1, 5], units),
    ):
        call.check([(row + pad)[:32]], [closed])


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_padded_rows_select_nothing(impl, device):
    call = Call(impl, device, 2, 2, 6, 5, 2, 5)
    ids, extra = call.run([[3, 0, 8, 9, 5, -1]] * 4, [0, 11])
    assert ids == [[-1] * 5] * 2 + [[0, 1, 2, 4, -1]] * 2
    assert extra == [0, 0, 3, 3]


@pytest.mark.parametrize(("impl", "device"), CASES)
def test_no_rows_at_all(impl, device):
    call = Call(impl, device, 0, 2, 6, 5, 2, 5)
    assert call.run([], []) == ([], [])


@pytest.mark.gpu
@NEEDS_GPU
def test_a_graph_replays_it():
    """A graph is captured once, and right for later selections."""
    select, units, unit = 300, 500, 16
    call = Call("triton", "cuda", 2, 2, select, units, unit, select)
    closed = [500, 320]
    lengths = torch.tensor(lengths_of(closed, unit), dtype=torch.int32, device="cuda")
    tokens, ids, extra = call.tokens[:, :select], call.ids[:, :select], call.extra[:4]

    def step():
        call.stage.list_units(tokens, lengths, ids, extra)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        order = [torch.randperm(units * unit, generator=generator)[:select] for _ in range(4)]
        tokens.copy_(torch.stack(order))
        graph.replay()
        for lane, row in enumerate(order):
            truth = expected(row.tolist(), closed[lane // 2], unit, select)
            assert (ids[lane].tolist(), int(extra[lane])) == truth
