"""Options of the algorithm suite, which the author of an algorithm sets. Functions of an author
are given the bench, the ``AlgorithmBench`` of ``bench``, which reads these options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv_authoring.selectors import ends_of
from topkv_testing.kit import Subject


@frozen
class AlgorithmOptions:
    """Options that an author gives the suite; the fixture ``options`` returns it.

    Attributes:
        params: strategy of parameter dicts; what a dict leaves out has the entry's default.
        promised: ``(length, bench) -> units`` that every selection of a request of that length
            holds, such as sinks. None for what the parameters ``sink_units`` and ``recent_units``
            of ``topkv_authoring.selectors.RankedUnits`` force: nothing, where it has neither.
        geometry: keyword arguments of ``strategies.geometries``, such as ``{"units": (4,)}``;
            ``groups`` and ``dims`` are those of the index where the entry says ``needs_index``.
            What they leave out is as small as the algorithm takes it with its default parameters.
        selects: widths K that are drawn; each must be possible with all ``params``. None for the
            least that the algorithm takes with its default parameters, and a few more: of one
            that ``attends`` the least with which a selection depends on the query.
        units: units of the longest request, rounded up to pages; None for eleven more than the
            least K, and more than a page.
        hidden_needles: a unit is judged by its best key: one key that matches is found among
            keys that point the other way. Mean-pooled representations cannot promise it.
        head_needles: every query head of a group finds the unit that it alone looks for, given
            room in the budget. Averaging queries before they are scored cannot promise it.
        by_key: ``(pool name, pool) -> pool`` with what is kept of each unit or token in its row,
            of pools that are ``packed``, whose rows are then compared as those of others are.
        oracle: ``(bench, slot, q) -> scores``, the algorithm's formula in float64, written apart
            from the plugin's code: of ``bench.keys[slot]`` and queries q ``[1, H, D]`` (of an
            indexer as ``bench.case.asked`` takes them apart) the scores ``[lane_heads, units]`` of
            all selectable units, on the CPU; promised ones have any. Selections of reference and
            kernels are compared with it, up to ties. None where there is no score for each unit.
        mass: attention mass, or share of all index scores, by which the selection of the kernels
            may differ from the reference, and share of the largest score by which a selection may
            differ from the oracle: what a tie in their arithmetic can be worth.
        long_units: units of the request on which kernels are tried once: enough for several
            blocks of them.
    """

    params: st.SearchStrategy[dict[str, Any]] = field(factory=lambda: st.just({}))
    promised: Callable[[int, Any], set[int]] | None = None
    geometry: Mapping[str, Any] = field(factory=dict)
    selects: Sequence[int] | None = None
    units: int | None = None
    hidden_needles: bool = False
    head_needles: bool = False
    by_key: Callable[[str, Tensor], Tensor] | None = None
    oracle: Callable[[Any, int, Tensor], Tensor] | None = None
    mass: float = 1e-5
    long_units: int = 300


def options_of(subject: Subject) -> AlgorithmOptions:
    """The subject's options, the defaults where it has none."""
    return AlgorithmOptions() if subject.options is None else subject.options


def forced(length: int, bench: Any) -> set[int]:
    """The first ``sink_units`` and the last ``recent_units`` of the selectable units, where the
    entry has these parameters."""
    params = bench.params
    units = range(bench.selectable_of(length))
    sinks, recent = ends_of(params, bench.group.select)
    return {*units[:sinks], *units[max(0, len(units) - recent) :]}
