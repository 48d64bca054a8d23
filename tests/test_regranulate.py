"""Algorithms that select tokens, with larger units: attention, and counts.

Each step must give float64 attention over the units of the tokens that the algorithm itself
selected, and over the open unit.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from tests import test_matrix
from tests.test_matrix import CELLS, STEPS, Run
from topkv.errors import ConfigError
from topkv_evaluation.eval.recall import arm, recall_of, watch
from topkv_testing.integrity import check_integrity
from topkv_testing.tiers import tier

SELECT = 12
BACKEND = "triton_attention"


def cases():
    """Cells that regranulation helps, and those of unit 4, each on its tiers."""
    cells = [cell for cell in CELLS if cell.behind]
    cells += [evolve(cell, unit=4) for cell in cells if (cell.backend, cell.unit) == (BACKEND, 16)]
    found = []
    for cell in cells:
        for on in map(tier, cell.behind):
            marks = [pytest.mark.gpu] if on.name == "gpu" else []
            if on.missing:
                marks.append(pytest.mark.skip(reason=f"tier {on.name!r}: {on.missing}"))
            if (on.name, cell.unit) == ("interpret", 64):
                marks.append(pytest.mark.nightly)
            what = (cell.algorithm, cell.backend, cell.scope, str(cell.unit), on.name)
            found.append(pytest.param(cell, on, id="-".join(what), marks=marks))
    return found


class Regranulated(Run):
    """One request whose tokens are selected one by one, and stored by units of ``cell.unit``."""

    def __init__(self, cell, on, **options):
        sizes = {"budget": cell.unit + SELECT, "buffer": cell.unit * SELECT}
        super().__init__(cell, on, **{"stages": ["regranulate"], **sizes, **options})
        self.extra = 0
        self.link = self.coordinator.layers[0].algorithm.links[-1]

    def selection(self):
        lanes = len(self.coordinator.lanes[0].selection.ids)
        return self.link.candidates.ids[:lanes]

    def chosen(self, ids):
        """Tokens of closed units that the algorithm selected."""
        unit = self.coordinator.lanes[0].group.unit
        end = (self.length - 1) // unit * unit
        chosen = [token for token in ids if token != -1]
        assert len(set(chosen)) == len(chosen), "a token twice"
        assert all(0 <= token < self.length for token in chosen)
        return {token for token in chosen if token < end}

    def attended(self, ids):
        unit, newest = self.coordinator.lanes[0].group.unit, self.length - 1
        chosen = self.chosen(ids)
        closed = {unit * (token // unit) + i for token in chosen for i in range(unit)}
        self.extra += len(closed - chosen)
        return closed | set(range(newest // unit * unit, newest + 1))

    def step(self):
        """Decode one token, and compare its output and the count of extra tokens."""
        band = 1e-4 if self.model.dtype is torch.float32 else 3e-2
        (out,) = self.forward(1, decode=True)
        self.extra = 0
        torch.testing.assert_close(out.double(), self.expected(), rtol=band, atol=band)
        lanes = len(self.coordinator.lanes[0].selection.ids)
        assert int(self.link.stage.extra[0, :lanes].sum()) == self.extra


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("cell", "on"), cases())
def test_units_of_the_selected_tokens_are_attended(cell, on):
    run = Regranulated(cell, on)
    stored, selected_as = (
        run.coordinator.layers[0].view.group,
        run.coordinator.layers[0].selector.view.group,
    )
    assert (stored.unit, selected_as.unit, selected_as.select) == (cell.unit, 1, SELECT)
    run.forward(run.most - STEPS, decode=False)
    for _ in range(STEPS):
        run.step()
    assert run.extra > 0
    check_integrity(run.coordinator)
    run.coordinator.close()


def test_a_cell_whose_library_is_missing_is_skipped_by_its_name(monkeypatch):
    monkeypatch.setattr(test_matrix, "lacking", lambda cell: ["some_library: not installed"])
    (cell, *_) = (cell for cell in CELLS if cell.behind and cell.backend != BACKEND)
    with pytest.raises(pytest.skip.Exception, match=f"{cell.backend}: some_library: not"):
        Regranulated(cell, tier("gpu"))


def of(algorithm):
    """The cell of an algorithm at unit 4 with scope of its own."""
    (cell, *_) = (
        cell for cell in CELLS
        if (cell.algorithm, cell.backend) == (algorithm, BACKEND) and cell.behind
    )  # fmt: skip
    return evolve(cell, unit=4)


@pytest.mark.parametrize("algorithm", ["double_sparsity", "clusterkv", "pqcache", "deepseek_dsa"])
def test_a_long_decode_crosses_units_and_windows(algorithm):
    """Across edges of units and pages, beyond a period of settling, from a prompt in chunks."""
    run = Regranulated(of(algorithm), tier("cpu"), most=150)
    for count in (37, 26, 1, 39):
        run.forward(count, decode=False)
    for _ in range(24):
        run.step()
    check_integrity(run.coordinator)
    run.coordinator.close()


@pytest.mark.parametrize("algorithm", ["double_sparsity", "clusterkv", "pqcache", "deepseek_dsa"])
def test_twins_and_what_was_taken_back(algorithm):
    """Rejected tokens do not come back, neither in the buffer nor in a representation."""
    sizes = {"most": 150, "max_requests": 2, "max_tokens": 320, "ring_tokens": 16}
    run = Regranulated(of(algorithm), tier("cpu"), **sizes)
    run.forward(101, decode=False)
    for _ in range(5):
        run.step()
    taken = run.length
    for back in (1, 5, 3):
        run.coordinator.rollback(run.slot, run.length - back)
        run.length -= back
        # Other tokens take their place.
        for x in (run.q, run.k):
            x[run.length : run.length + back] = x[run.length : run.length + back].flip(-1)
        if run.index:
            run.index.k[run.length : run.length + back] *= -1
        for _ in range(back):
            run.step()
    assert run.length == taken
    twin = run.coordinator.fork(run.slot)
    run.coordinator.request_end(run.slot)
    run.slot = twin
    for _ in range(4):
        run.step()
    check_integrity(run.coordinator)
    run.coordinator.close()


@pytest.mark.parametrize("algorithm", ["double_sparsity", "clusterkv", "pqcache", "deepseek_dsa"])
def test_the_algorithm_selects_what_it_selects_at_unit_1(algorithm):
    """The algorithm is given the same keys, lengths, windows, periods and host ids of tokens."""
    sizes = {"most": 150, "ring_tokens": 16}
    regranulated = Regranulated(of(algorithm), tier("cpu"), **sizes)
    select = SELECT if algorithm == "deepseek_dsa" else SELECT + 1  # there the newest competes
    tokens = Run(evolve(of(algorithm), unit=1), tier("cpu"), budget=select, buffer=select, **sizes)
    runs = (regranulated, tokens)
    for count in (37, 26, 1, 39):
        for run in runs:
            run.forward(count, decode=False)
    for back in (0, 3, 7):
        for _ in range(9):
            for run in runs:
                run.forward(1, decode=True)
            assert regranulated.selected == tokens.selected
        for run in runs:
            run.coordinator.rollback(run.slot, run.length - back)
            run.length -= back
    for run in runs:
        run.coordinator.close()


def test_prompts_stay_exact():
    """A model that is sparse in prompts too attends single tokens there."""
    runs = [Run(evolve(of("deepseek_dsa"), unit=1), tier("cpu"), budget=SELECT, buffer=SELECT)]
    runs.append(Regranulated(of("deepseek_dsa"), tier("cpu")))
    outs = [run.forward(40, decode=False) for run in runs]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-6)
    for run in runs:
        run.coordinator.close()


def test_every_token_in_a_unit_of_its_own_finds_room():
    """As many units as tokens: the widest that a selection can be."""
    run = Regranulated(of("double_sparsity"), tier("cpu"), most=80)
    run.forward(run.most - STEPS, decode=False)
    algorithm = run.coordinator.layers[0].algorithm.algorithm
    spread = [*range(3, 4 * SELECT, 4)]

    class Spread:
        def __getattr__(self, name):
            return getattr(algorithm, name)

        def retrieve_topk(self, layer, q, weights, out):
            out.ids.copy_(torch.tensor(spread, dtype=torch.int32).expand(out.ids.shape).flip(1))
            return out

    run.coordinator.layers[0].algorithm.algorithm = Spread()
    run.step()
    assert run.coordinator.lanes[0].selection.ids.tolist() == [list(range(SELECT))] * 2
    assert run.extra == 2 * 3 * SELECT
    run.coordinator.close()


def test_the_measured_mass_is_that_of_what_is_attended():
    """``topkv eval`` looks at tokens that were selected, and weighs the units."""
    run = Regranulated(of("double_sparsity"), tier("cpu"), most=80)
    run.forward(70, decode=False)
    paths = watch(run.coordinator)
    arm(paths, True)
    run.forward(1, decode=True)
    (look,) = recall_of(run.coordinator, paths, [run.slot], [0], SELECT)
    masses = []
    for head in range(run.model.num_heads):
        lane = head // run.model.group_size
        keys = run.k[: run.length, lane].double()
        mass = (keys @ run.q[run.length - 1, head].double() * run.model.scale).softmax(0)
        masses.append(float(mass[sorted(run.attended(run.selected[lane]))].sum()))
    assert look.held == pytest.approx(sum(masses) / len(masses), abs=1e-5)
    run.coordinator.close()


def test_the_buffer_may_not_be_smaller():
    with pytest.raises(ConfigError, match="each of 12 tokens may lie in one of its own"):
        Regranulated(of("double_sparsity"), tier("cpu"), buffer=4 * SELECT - 4)
