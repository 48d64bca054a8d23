"""Which plugins fit together, read from entries alone: imports neither torch nor a plugin's code.

A cell is an algorithm with a backend, a kind of attention, a unit and a scope. ``lower`` asks the
same check (``topkv.config.negotiation``) and, beyond it, about sizes, dtypes and heads of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from attrs import frozen

from topkv.config.negotiation import LayerPlan, refusals
from topkv.entries import TIERS, PluginEntry
from topkv.plugins import PluginRecord

UNITS = (1, 16, 64)
"""Units of the matrix, beside the default unit of each algorithm."""

SHAPES = (("gqa", "kv_head"), ("gqa", "shared"), ("mla", "shared"))
"""Kinds of attention and scopes. Latent rows have one kv-head: its scope is the shared one."""


@frozen
class Cell:
    """One combination.

    Attributes:
        tiers: where both plugins run, and so where it is tested; empty where it is refused.
        reasons: why it is refused, each with the plugin that refuses.
        stage: a stage that turns tokens into units, behind which the algorithm takes this one;
            None where there is none, or it does not help.
        behind: tiers where it runs with that stage.
    """

    algorithm: str
    backend: str
    attention: str
    scope: str
    unit: int
    tiers: tuple[str, ...]
    reasons: tuple[str, ...]
    stage: str | None = None
    behind: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """``"supported"``, ``"refused"``, or ``"untested"``: allowed, with no tier in common."""
        if self.reasons:
            return "refused"
        return "supported" if self.tiers else "untested"


def matrix(records: Iterable[PluginRecord]) -> list[Cell]:
    """Return the cells of all usable entries, by algorithm, attention, scope, unit, backend."""
    entries = [record.entry for record in records if record.entry and not record.problem]
    algorithms = sorted((e for e in entries if e.kind == "algorithm"), key=lambda e: e.name)
    backends = sorted((e for e in entries if e.kind == "backend"), key=lambda e: e.name)
    stages = [e for e in entries if e.kind == "stage" and e.capabilities.regrains]
    cells = []
    for algorithm, (attention, scope) in product(algorithms, SHAPES):
        units = sorted({*UNITS, algorithm.defaults.get("unit", UNITS[0])})
        for unit, backend in product(units, backends):
            both = (algorithm, backend)
            reasons = tuple(
                f"{entry.name} {reason}"
                for entry in both
                for reason in _refusals(entry, attention, scope, unit)
            )
            what = (algorithm.name, backend.name, attention, scope, unit)
            if not reasons:
                cells.append(Cell(*what, _tiers(both), ()))
                continue
            helping = [s for s in stages if _regrains(algorithm, s, backend, what[2:])]
            with_it = [(s.name, _tiers((*both, s))) for s in helping]
            cells.append(Cell(*what, (), reasons, *(with_it[0] if with_it else ())))
    return cells


def _regrains(
    algorithm: PluginEntry, stage: PluginEntry, backend: PluginEntry, at: tuple[str, str, int]
) -> bool:
    """Return True if the stage turns tokens of the algorithm into units that the backend takes."""
    attention, scope, unit = at
    refusals = (
        *_refusals(algorithm, attention, scope, 1),
        *_refusals(stage, attention, scope, 1),
        *_refusals(backend, attention, scope, unit),
    )
    return algorithm.capabilities.single_tokens and not refusals


def _tiers(entries: Iterable[PluginEntry]) -> tuple[str, ...]:
    return tuple(t for t in TIERS if all(_runs(e, t) for e in entries))


def _refusals(entry: PluginEntry, attention: str, scope: str, unit: int) -> list[str]:
    plan = LayerPlan(residency="sparse", scope=scope, unit=unit, selects=unit)
    return [takes for takes, _ in refusals(entry, plan, attention)]


def _runs(entry: PluginEntry, tier: str) -> bool:
    """Return True if a plugin states a tier and the implementation that runs there."""
    impl = "reference" if tier == "cpu" else "triton"
    return tier in entry.capabilities.tiers and impl in entry.impls


def rows_of(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table: a row for each algorithm, attention, scope and unit that it
    takes, if need be with a stage behind it.

    Combinations that an algorithm itself refuses, whatever the backend, are in ``matrix`` alone.
    """
    backends = sorted({cell.backend for cell in cells})
    rows: dict[tuple[str, str, str, int], dict[str, Cell]] = {}
    for cell in cells:
        key = (cell.algorithm, cell.attention, cell.scope, cell.unit)
        rows.setdefault(key, {})[cell.backend] = cell
    taken = {key: found for key, found in rows.items() if any(map(_is_open, found.values()))}
    head = ["algorithm", "attention", "scope", "unit", *backends]
    return head, [
        [*map(str, key), *(_text(found[backend]) for backend in backends)]
        for key, found in taken.items()
    ]


def _is_open(cell: Cell) -> bool:
    """Return True if the algorithm itself does not refuse the cell."""
    own = f"{cell.algorithm} "
    return cell.stage is not None or not any(text.startswith(own) for text in cell.reasons)


def _text(cell: Cell) -> str:
    if cell.stage is not None:
        return f"{cell.stage}: {' '.join(cell.behind) or 'untested'}"
    if cell.state == "refused":
        who = f"{cell.backend} "
        its = [text.removeprefix(who) for text in cell.reasons if text.startswith(who)]
        return "; ".join(its or cell.reasons)
    return " ".join(cell.tiers) or "untested"
