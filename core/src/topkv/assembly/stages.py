"""Stages behind an algorithm, which together are one algorithm for the core.

A group with stages gets a ``Staged`` instead of its algorithm. It has the hooks of an algorithm,
asks the algorithm for more units than are attended, hands them from stage to stage, and lets one
correct the attention output. Little else knows of stages: pools follow from the spec of the
``Staged``, and selectors call it as they call any algorithm. A group without stages has its
algorithm itself, and so has one whose stages only stand for options of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from topkv.config import LoweredConfig, LoweredGroup
from topkv.config.stages import StageSettings
from topkv.errors import CONFIG_REFUSED, ConfigError, PluginError
from topkv.hooks.algorithm import Algorithm, AlgorithmSpec, RepresentationSpec
from topkv.hooks.stage import Stage, StageSetup, StageSpec
from topkv.plugins import PluginRegistry
from topkv.plugins.contract import has_hook
from topkv.types import GroupShape, LayerView, Selection

_PREFIX = "stages["

ASKED = ("refine", "correct", "bind")
"""Hooks that make a stage one link of a chain; a stage may have some of them."""


@frozen(eq=False)
class Link:
    """One stage of a chain.

    Attributes:
        stage, spec: the instance, and its spec.
        group: the group of its setup: it leaves ``select`` units.
        candidates: memory for the K' units or tokens that it is given, of all lanes; None if it
            refines nothing.
        prefix: prefix of the names of its pools among those of the group.
    """

    stage: Stage
    spec: StageSpec
    group: GroupShape
    candidates: Selection | None
    prefix: str

    def representations(self) -> list[RepresentationSpec]:
        """Return the specs of its pools, under names that no other stage or algorithm uses."""
        return [evolve(spec, name=self.prefix + spec.name) for spec in self.spec.representations]

    def view(self, layer: LayerView) -> LayerView:
        """A layer as the stage sees it: with its own pools alone."""
        pools = {
            spec.name: layer.pools[self.prefix + spec.name] for spec in self.spec.representations
        }
        return evolve(layer, group=self.group, pools=pools)


class Stages:
    """The stages of a group; of most groups none.

    Args:
        group: the group as the last stage leaves it.
        device: where the stages run.

    Attributes:
        group: the group for the algorithm, which selects the candidates of the first stage.
    """

    def __init__(self, group: GroupShape, device: torch.device) -> None:
        self.group, self.device, self._links = group, device, list[Link]()

    def put_first(self, stage: Stage, number: int, tokens: GroupShape | None = None) -> None:
        """Put a stage before the others; it was made for ``group`` as it is now.

        Args:
            stage: the stage.
            number: its place in the setting.
            tokens: the group in tokens, for what stands before a stage that regrains; else None.

        Raises:
            PluginError: it does nothing, asks for candidates that it does not refine, or
                regrains and does more than that.
        """
        spec, group, candidates = stage.spec(), self.group, None
        refines, who = has_hook(stage, "refine"), f"stage {number} ({type(stage).__name__})"
        if not any(has_hook(stage, hook) for hook in ASKED):
            raise PluginError(who, [f"it has none of {', '.join(ASKED)}; implement one of them"])
        if tokens:
            _require_refine_alone(stage, spec, who)
            self.group = tokens
        elif refines:
            self.group = evolve(group, select=min(spec.widen * group.select, group.max_units))
        elif spec.widen > 1:
            reason = f"spec() says widen={spec.widen}, and it has no refine; say 1"
            raise PluginError(who, [reason])
        if refines:
            shape = (group.max_lanes, self.group.select)
            candidates = Selection(torch.full(shape, -1, dtype=torch.int32, device=self.device))
            if spec.reads_scores:
                candidates.scores = torch.zeros(shape, device=self.device)
        self._links.insert(0, Link(stage, spec, group, candidates, f"{_PREFIX}{number}]."))

    def behind(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm with these stages behind it; itself where there are none.

        Raises:
            ConfigError: it cannot have stages behind it.
        """
        return Staged(algorithm, self.group, self._links) if self._links else algorithm


def make_stages(registry: PluginRegistry, config: LoweredConfig, group: LoweredGroup) -> Stages:
    """Make the stages that a group names.

    Raises:
        ConfigError, PluginError: one of them refuses.
    """
    made = Stages(group.shape, config.device)
    # From the last to the first: what one is given, the one before it leaves.
    for number, asked in reversed(list(enumerate(group.stages))):
        setup = StageSetup(config.model, made.group, asked.params, config.device, group.queries)
        stage = registry.create("stage", asked.name, setup, config.impl)
        if asked.regrains or any(has_hook(stage, hook) for hook in ASKED):
            made.put_first(stage, number, group.selected_as if asked.regrains else None)
        else:
            _require_option(stage, asked)
    return made


def _require_refine_alone(stage: Stage, spec: StageSpec, who: str) -> None:
    """Refuse a stage that regrains and does anything but refine: the core keys the pools of a
    group by tokens then, and what is attended by units."""
    hooks = (*ASKED, "construct", "update")
    found = [hook for hook in hooks if has_hook(stage, hook)]
    if found != ["refine"] or spec != StageSpec():
        raise PluginError(
            who,
            [
                "its entry says that it turns tokens into units, which takes refine alone and the "
                f"spec StageSpec(); it has {', '.join(found)} and {spec}"
            ],
        )


def _require_option(stage: Stage, asked: StageSettings) -> None:
    """Refuse a stage with none of ``ASKED``, which is never called, unless it stands for an
    option of attention."""
    reasons, lack = [], f"it has none of {', '.join(ASKED)}"
    if not asked.options:
        reasons.append(f"{lack}, and its entry names no option of attention")
    if stage.spec() != StageSpec():
        reasons.append(f"{lack}, and would use neither representations nor candidates")
    if reasons:
        raise PluginError(f"stage {asked.name!r} would do nothing", reasons)


def bind_stages(
    algorithms: Iterable[Algorithm | None], coordinator: Any
) -> list[Callable[[np.ndarray], None]]:
    """Bind the stages behind algorithms that ask for it; return what a coordinator then calls
    with the slots of its decode rows before it leases pages."""
    links = [link for each in algorithms if isinstance(each, Staged) for link in each.links]
    bound = [link.stage.bind(coordinator) for link in links if has_hook(link.stage, "bind")]
    return [call for call in bound if call]


class Staged:
    """An algorithm with stages behind it. The contract is ``topkv.hooks.algorithm``.

    Args:
        algorithm: the algorithm.
        group: as the algorithm sees it.
        links: the stages, at least one.
    """

    construct: Any
    update: Any
    correct: Any = None
    settle: Any = None
    truncated: Any = None
    retrieve_prompt: Any = None

    def __init__(self, algorithm: Algorithm, group: GroupShape, links: Sequence[Link]) -> None:
        self.algorithm, self.group, self.links = algorithm, group, links
        self._spec = algorithm.spec()
        refused = [
            f"the algorithm has a pool {spec.name!r}, and names with {_PREFIX!r} are those of "
            "stages; rename it"
            for spec in self._spec.representations
            if spec.name.startswith(_PREFIX)
        ]
        # One that regrains leaves everything that was selected, and prompts attend to tokens.
        refines = any(link.group.unit == group.unit for link in links)
        if refines and has_hook(algorithm, "retrieve_prompt"):
            refused.append(
                "the algorithm selects for the rows of a prompt too (retrieve_prompt), and stages "
                "refine the selections of decode steps alone; leave stages out"
            )
        self._views: dict[tuple[int, int], list[LayerView]] = {}
        for hook in ("settle", "truncated", "retrieve_prompt"):
            self._hand_on(hook, [-1])
        everybody = range(-1, len(links))
        for hook in ("construct", "update"):
            self._hand_on(hook, everybody)
        correcting = self._hand_on("correct", everybody)
        if len(correcting) > 1:
            refused.append(
                "what was not attended is corrected for more than once, by the stages "
                f"{correcting} (-1 is the algorithm itself); leave one of them"
            )
        refused += self._order_refusals()
        if refused:
            raise ConfigError(CONFIG_REFUSED, refused)

    def _hand_on(self, hook: str, places: Iterable[int]) -> list[int]:
        """Pass calls of a hook on to the stages at these places, -1 for the algorithm, each with
        its own view of a layer. Return the places that have the hook."""
        owners = [*(link.stage for link in self.links), self.algorithm]
        found = [place for place in places if has_hook(owners[place], hook)]

        def call(layer: LayerView, *given: Any) -> None:
            views = self._seen(layer)
            for place in found:
                getattr(owners[place], hook)(views[place], *given)

        if found:
            setattr(self, hook, call)
        return found

    def _order_refusals(self) -> list[str]:
        """Return reasons of stages whose candidates have no scores, or another order."""
        reasons, before = [], "the algorithm"
        given: AlgorithmSpec | StageSpec = self._spec
        for number, link in enumerate(self.links):
            wanted, who = link.spec, f"stage {number} ({type(link.stage).__name__})"
            if wanted.reads_scores and not given.scores:
                reasons.append(
                    f"{who} reads the scores of its candidates, and {before} gives none; take "
                    "another algorithm, or leave the stage out"
                )
            if wanted.reads_order not in ("any", given.order):
                reasons.append(
                    f"{who} needs candidates in the order {wanted.reads_order!r}, and {before} "
                    f"gives {given.order!r}; take another algorithm, or leave the stage out"
                )
            if link.candidates is not None:
                before, given = who, wanted
        return reasons

    def spec(self) -> AlgorithmSpec:
        """Return the algorithm's spec, with the pools of all stages."""
        own = [pool for link in self.links for pool in link.representations()]
        stated = {link.spec.prefix for link in self.links}
        alone = "none" in stated or any(pool.grain == "request" for pool in own)
        pools, prefix = (*self._spec.representations, *own), self._spec.prefix
        return evolve(self._spec, representations=pools, prefix="none" if alone else prefix)

    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        *views, own = self._seen(layer)
        rooms, stages = [], []
        for link, view in zip(self.links, views, strict=True):
            if link.candidates is not None:
                rooms.append(_narrowed(link.candidates, len(out.ids)))
                stages.append((link.stage, view))
        rooms.append(out)
        selection = self.algorithm.retrieve_topk(own, q, weights, rooms[0])
        for (stage, view), room in zip(stages, rooms[1:], strict=True):
            selection = stage.refine(view, q, selection, room)
        return selection

    def _seen(self, layer: LayerView) -> list[LayerView]:
        """Return the views of a layer for each stage, and for the algorithm; made once."""
        key = (layer.layer, id(layer.step))
        found = self._views.get(key)
        if found is None or found[-1].step is not layer.step:
            pools = {spec.name: layer.pools[spec.name] for spec in self._spec.representations}
            own = evolve(layer, group=self.group, pools=pools)
            found = self._views[key] = [*(link.view(layer) for link in self.links), own]
        return found


def _narrowed(room: Selection, lanes: int) -> Selection:
    """Return the first lanes of memory for a selection."""
    return Selection(room.ids[:lanes], None if room.scores is None else room.scores[:lanes])
