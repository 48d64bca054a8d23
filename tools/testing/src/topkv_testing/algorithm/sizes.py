"""The smallest sizes that an algorithm takes, found by trying. Part of the algorithm suite.

Where an author says nothing of sizes, requests are a few units long, and a few of them are
selected. Some algorithms refuse that with their default parameters, and some then select the same
whatever is asked: sinks alone, say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from attrs import evolve, frozen

from topkv.entries import Capabilities
from topkv.errors import ConfigError
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.memory import made
from topkv_testing.algorithm.options import AlgorithmOptions, options_of
from topkv_testing.kit import Subject
from topkv_testing.strategies import geometry, stated

Values = Mapping[str, Sequence[Any]]
"""Values by argument of ``strategies.geometries``, the most wanted first."""

FURTHER: Values = {
    "dims": (32, 64, 128),
    "units": (8, 32, 64, 128),
    "page_units": (8, 16, 32, 64, 128),
    "groups": (1,),
}
"""Values to try where the algorithm takes none that the suite wants. For other arguments the first
value stands for all."""

STEPS = (0, 1, 2, 4)
"""Distances of the K that are drawn from the least K."""

ROOM = 11
"""Units that the longest request has more than the least K."""

MOST, ASKED = 1024, 64
"""The largest K that is tried, and the largest with which it is tried whether the query counts."""


@frozen
class Sizes:
    """Sizes at which an algorithm is tested.

    Attributes:
        subject: the algorithm.
        capabilities: what it states, of heads that are those of its keys.
        wanted: values of every argument that the suite wants.
        weights: as in ``Case``.
        selects, units: see ``AlgorithmOptions``.
        point: a value of every argument of ``strategies.geometry``, which the algorithm takes
            together with its default parameters. Empty where it takes nothing that is tried:
            then everything that is wanted is drawn.
    """

    subject: Subject
    capabilities: Capabilities
    wanted: Values
    weights: str | None
    selects: Sequence[int]
    units: int
    point: Mapping[str, Any]

    def taken(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values of an argument that the algorithm takes beside ``point``."""
        return [
            value
            for value in stated(self.capabilities, name, values)
            if not self.point or self.takes({**self.point, name: value}, self.selects[0])
        ]

    def takes(self, point: Mapping[str, Any], select: int) -> bool:
        """Return True if the algorithm takes a geometry and a K."""
        try:
            made(self.subject, self._case(point, select), self.subject.tier.impl, 1)
        except ConfigError:
            return False
        return True

    def asks(self, point: Mapping[str, Any], select: int) -> bool:
        """Return True if a query and its opposite select differently."""
        impls, case = self.subject.entry.impls, self._case(point, select)
        bench = AlgorithmBench(self.subject, case, impl=impls[0], requests=1)
        bench.prefill(0, case.tokens(0)[:-1])
        q = case.queries(1)
        one, two = (bench.retrieve(each, [0]).sort().values for each in (q, -q))
        return not torch.equal(one, two)

    def _case(self, point: Mapping[str, Any], select: int) -> Case:
        shape, units = geometry(**point), select + ROOM
        index = self.capabilities.needs_index
        return Case(shape, {}, select, 2, "normal", 1, units, 96.0, True, self.weights, index)


def find(subject: Subject, wanted: Values, weights: str | None) -> Sizes:
    """The smallest sizes of an algorithm.

    Args:
        subject: the algorithm.
        wanted: values of every argument.
        weights: as in ``Case``.

    Raises:
        ConfigError: it takes nothing that is tried, and its author says nothing.
    """
    options, stated_ = options_of(subject), subject.entry.capabilities
    if stated_.needs_index:
        # What the entry says of heads is about the model's, see ``algorithm.memory``.
        stated_ = evolve(stated_, head_dims=None, max_group=None)
    selects = options.selects or [1 + step for step in STEPS]
    units = options.units or 1 + ROOM
    plain = Sizes(subject, stated_, wanted, weights, selects, units, {})
    for further in (False, True):
        offered = _offered(plain, options, further)
        for select in options.selects or [2**n for n in range(MOST.bit_length())]:
            for values in product(*offered.values()):
                point = dict(zip(offered, values, strict=True))
                if plain.takes(point, select):
                    found = evolve(plain, point=point)
                    return found if options.selects else _with_least(found, select, options)
    if subject.options is None:
        first = {name: values[0] for name, values in offered.items()}
        made(subject, plain._case(first, selects[0]), subject.tier.impl, 1)
    return plain


def _offered(sizes: Sizes, options: AlgorithmOptions, further: bool) -> dict[str, list[Any]]:
    """Values to try: the author's, those that the suite wants, and further ones, among them the
    entry's defaults."""
    defaults, found = sizes.subject.entry.defaults, dict[str, list[Any]]()
    unit = defaults.get("unit", 1)
    own = {"units": unit, "page_units": max(defaults.get("page_tokens", unit) // unit, 1)}
    for name, values in sizes.wanted.items():
        more = [*FURTHER.get(name, ()), *([own[name]] if name in own else [])] if further else []
        every = options.geometry.get(name) or [*values, *more]
        every = stated(sizes.capabilities, name, every)
        found[name] = every if name in FURTHER else every[:1]
    return {**found, "scopes": [(sizes.capabilities.scopes or ("kv_head",))[0]]}


def _with_least(sizes: Sizes, select: int, options: AlgorithmOptions) -> Sizes:
    """Return the sizes with the least K that is taken, between ``select``, which is, and its half,
    which is not. Where it is promised that the query counts, it counts with this K."""
    low, high = select // 2, select
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if sizes.takes(sizes.point, middle) else (middle, high)
    if "attends" in sizes.capabilities.traits:
        high = next((k for k in range(high, ASKED) if sizes.asks(sizes.point, k)), high)
    selects = [high + step for step in STEPS]
    units = max(high + ROOM, sizes.point["page_units"] + 1)  # more than a page
    return evolve(sizes, selects=selects, units=options.units or units)
