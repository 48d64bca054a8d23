"""The base class of stages that score pages, and the reasons why pages cannot be given back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from topkv.assembly.stages import Staged
from topkv.config import LoweredConfig
from topkv.coordinator import SparseCoordinator
from topkv.decode.selectors import Own
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.stage import StageSpec
from topkv.plugins.contract import has_hook
from topkv.plugins.discovery import hookimpl
from topkv.types import LayerView
from topkv_dropping.dropping import Dropping, Keeping


class ScoresPages(ABC):
    """Base of stages that say what the pages of a request are worth.

    The pages of a request that are worth least are given back, in all layers at once, as soon as
    it decodes and has grown longer than ``keeping`` says. The others move up: units are numbered
    anew, and the request has fewer tokens. A group has one such stage at most, and an algorithm
    with ``settle``, ``truncated`` or pools of grain ``"request"`` cannot stand before it: what it
    keeps of a request uses the old numbers. It ends the sharing of prefixes, and is refused where
    an engine gives out the pages.

    A subclass states what stays (``keeping``), what is kept of keys (``representations``) and
    what a page is worth by that (``keep``), and has ``construct`` and ``update`` of a stage.

    Attributes:
        keeping: what stays, alike in all groups.
    """

    keeping: Keeping

    @abstractmethod
    def representations(self) -> Sequence[RepresentationSpec]:
        """The pools of the stage, of grain ``"unit"`` or ``"token"``."""

    @abstractmethod
    def keep(
        self, layer: LayerView, slot: int, length: int, position: int, scores: Tensor
    ) -> None:
        """Score the pages of a request. Cold, between forwards.

        Args:
            layer: the layer. Host ids follow from ``layer.step.page_table[slot]``.
            slot: request slot.
            length: tokens of the request that are left.
            position: position of the token that it decodes next, given-back tokens included:
                ``length`` or more. RoPE has rotated keys by such positions.
            scores: fp32 ``[lane_heads, pages]`` of its full pages, every element to be written,
                finite: pages with high scores stay. Scores of a lane are compared with each other
                alone.
        """

    @hookimpl
    def spec(self) -> StageSpec:
        return StageSpec(tuple(self.representations()), prefix="none")

    @hookimpl
    def bind(self, coordinator: SparseCoordinator) -> Callable[[np.ndarray], None] | None:
        asked = [
            (link.stage, link.view(path.selector.view))
            for path in coordinator.layers
            if isinstance(path.algorithm, Staged) and isinstance(path.selector, Own)
            for link in path.algorithm.links
            if isinstance(link.stage, ScoresPages)
        ]
        if not asked or asked[0][0] is not self:
            return None  # pages go in all layers at once, so the first of all such stages does it
        found = list(dict.fromkeys(stage.keeping for stage, _ in asked))
        chains = {id(path.algorithm): path.algorithm for path in coordinator.layers}
        reasons = [why for chain in chains.values() for why in _chain_refusals(chain)]
        reasons += _refusals(coordinator.config, found)
        if reasons:
            raise ConfigError(CONFIG_REFUSED, reasons)
        scores = [partial(stage.scores, view) for stage, view in asked]
        return Dropping(coordinator.requests, found[0], scores).run

    def scores(self, layer: LayerView, slot: int, length: int, position: int) -> Tensor:
        """Return what ``keep`` writes, fp32 ``[lane_heads, pages]``. Cold."""
        shape = (layer.group.lane_heads, length // layer.group.page_tokens)
        scores = torch.empty(shape, dtype=torch.float32, device=layer.step.slots.device)
        self.keep(layer, slot, length, position, scores)
        return scores


def _refusals(config: LoweredConfig, found: Sequence[Keeping]) -> Iterable[str]:
    """Yield reasons why pages cannot be given back at all, or not as much as is asked for."""
    if len(found) > 1:
        yield (
            "pages are given back for all layers at once, and stages ask for different "
            f"things: {', '.join(map(str, found))}; give them the same parameters"
        )
    if config.pages == "engine":
        yield "pages are given back by stages, and here they are an engine's"
    for asked in found:
        least = asked.least_tokens(config.page_tokens)
        if asked.tokens < least:
            yield f"{asked} leaves no page to choose from; tokens must be at least {least}"


def _chain_refusals(chain: object) -> Iterable[str]:
    """Yield reasons of an algorithm with stages; none where no stage scores pages."""
    links = chain.links if isinstance(chain, Staged) else ()
    scoring = [at for at, link in enumerate(links) if isinstance(link.stage, ScoresPages)]
    if not isinstance(chain, Staged) or not scoring:
        return
    if len(scoring) > 1:
        yield f"the stages {scoring} all say which pages stay; leave one of them"
    numbered = [hook for hook in ("settle", "truncated") if has_hook(chain.algorithm, hook)]
    pools = [pool for link in links for pool in link.spec.representations]
    pools += chain.algorithm.spec().representations
    numbered += [f"pool {pool.name!r}" for pool in pools if pool.grain == "request"]
    if numbered:
        yield (
            "pages are given back and the others numbered anew, and what the algorithm or a "
            f"stage keeps of a request uses the old numbers ({', '.join(numbered)}); take "
            "another algorithm, or leave the stage out"
        )
