"""Hook specs of a stage, which stands behind an algorithm.

A stage refines what the algorithm selects, corrects the attention output for units that were not
selected, or is called between forwards.

``factory(setup)`` gives one instance per group for a ``StageSetup``; an entry names a factory for
each implementation. The setting ``stages`` lists stages in the order in which they are asked. One
with ``refine`` is given more units than are attended, as many times more as ``StageSpec.widen``
says, and passes some of them on to the next. What the last one leaves is planned, loaded and
attended. One with ``correct`` is asked behind attention; a group has one at most. So a stage goes
with any algorithm that selects in decode steps alone.

One with ``bind`` is given the coordinator, and may have requests looked after before each forward.
``topkv_dropping.stage.ScoresPages`` of topkv-dropping is the base of stages that say which pages a
request may lose while it generates.

A stage may keep representations of its own, in pools like those of an algorithm, and then has
``construct`` and ``update``, as in ``topkv.hooks.algorithm``. Its ``layer.pools`` holds its own
pools and no others. What it keeps in pools of grain ``"unit"`` and ``"token"`` depends on the keys
of their page alone. One that keeps a pool of grain ``"request"`` ends the sharing of
prefixes, and so does one that says so (``StageSpec.prefix``).

``update``, ``refine`` and ``correct`` are hot, and their arguments as strided, as in
``topkv.hooks.algorithm``.

A stage may also stand for an option of attention (``Capabilities.options``): its parameters go to
the backend of the group (``BackendSetup.options``), and a backend without the option is refused.
The factory of the stage is asked first, so that it checks the parameters for all backends. A stage
that does nothing else has no call in any step.

A stage whose entry says ``regrains`` turns tokens into units: candidates of its ``refine`` are
tokens, ``ids`` the closed units of ``layer.group`` that hold them. It is the last one, does
nothing else, and its ``layer`` shows neither ring nor pools. The buffer has room for a unit of
each token, so no token needs to be lost.

A stage does not know which candidates its algorithm promises to select, such as sinks: one that
should keep them has a parameter for it. Defaults of a stage's entry are not read.

Refused are stages behind an algorithm that uses the model's own indexer, or that selects for the
rows of a prompt too (``retrieve_prompt``), except one that regrains; and ``correct`` where one
regrains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from attrs import field, frozen
from attrs.validators import ge, in_
from torch import Tensor

from topkv.hooks.algorithm import ORDERS, RepresentationSpec
from topkv.plugins.discovery import hookspec, optional
from topkv.types import GroupShape, LayerView, ModelShape, Selection


@frozen
class StageSpec:
    """Sizes of a stage, which the core asks for before it allocates anything.

    Attributes:
        representations: its pools, each name once.
        widen: candidates for each unit that is left. A stage that leaves K units is given
            ``K' = min(widen * K, group.max_units)`` candidates; 1 for one that only drops some,
            or has no ``refine``.
        prefix: ``"pages"``, or ``"none"`` where no other request can take over the pages of a
            prompt, as in ``AlgorithmSpec``.
        reads_scores: ``refine`` reads the scores of its candidates. The core refuses the stage
            behind an algorithm or a stage that gives none.
        reads_order: order of the candidates that ``refine`` needs, of
            ``topkv.hooks.algorithm.ORDERS``; the core refuses candidates of another one.
        scores, order: of what ``refine`` leaves, as in ``AlgorithmSpec``.
    """

    representations: tuple[RepresentationSpec, ...] = ()
    widen: int = field(default=1, validator=ge(1))
    prefix: str = field(default="pages", validator=in_(("pages", "none")))
    reads_scores: bool = False
    reads_order: str = field(default="any", validator=in_(ORDERS))
    scores: bool = False
    order: str = field(default="any", validator=in_(ORDERS))


@frozen
class StageSetup:
    """The argument of a stage's factory.

    Attributes:
        model: geometry of the attention layers.
        group: the group as the algorithm sees it, in units of one token where a stage behind this
            one regrains; of that stage as it is stored. ``group.select`` is K, the width of what
            this stage leaves.
        params: instance of ``PluginEntry.parameters`` with the values that hold here.
        device: where it will run.
        max_queries: most queries Q of a row, see ``topkv.hooks.algorithm``.
    """

    model: ModelShape
    group: GroupShape
    params: Any
    device: torch.device
    max_queries: int = 1


class Stage(Protocol):
    """A stage of one group, with some of ``refine``, ``correct`` and ``bind``, or an option of
    attention."""

    @hookspec
    def spec(self) -> StageSpec:
        """Representations and candidates. Cold, before any allocation."""

    @optional
    @hookspec
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        """Write the representations of the units that a prefill chunk touched. Cold.

        Called behind the algorithm's, with the same ``start``, ``k``, ``v``, ``q`` and ``lse``:
        see ``Algorithm.construct``.
        """

    @optional
    @hookspec
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        """Follow the tokens that each decode row appended. Hot.

        Called behind the algorithm's, with the same ``k`` and ``v``: see ``Algorithm.update``.
        """

    @optional
    @hookspec
    def refine(
        self, layer: LayerView, q: Tensor, candidates: Selection, out: Selection
    ) -> Selection:
        """Choose among candidates. Hot.

        Args:
            layer: the layer; ``layer.group.select`` is K.
            q: ``[B, Q, H, D]`` post-RoPE queries.
            candidates: K' units, or tokens for a stage that regrains, as the algorithm, or the
                stage before, left them, with scores where ``StageSpec.reads_scores``. Only read.
            out: memory for K units, owned by the core; ``scores`` where the spec says that there
                are some and the next stage reads them, else None.

        Returns:
            Some of the row's candidates, or of the units that hold them, each once: ``out``, or
            tensors of its own as in ``Algorithm.retrieve_topk``. Which ones does not depend on the
            order of the candidates, unless ``StageSpec.reads_order`` asks for one: each top-k has
            an order of its own.
        """

    @optional
    @hookspec
    def correct(
        self, layer: LayerView, q: Tensor, selection: Selection, out: Tensor, lse: Tensor
    ) -> None:
        """Correct the attention output in place by an estimate for units that were left out. Hot.

        Args:
            layer: the layer.
            q, selection, out, lse: as in ``Algorithm.correct``.
        """

    @optional
    @hookspec
    def bind(self, coordinator: Any) -> Callable[[np.ndarray], None] | None:
        """Bind to a coordinator, once and before any request. Cold.

        Args:
            coordinator: a ``SparseCoordinator`` of which all but ``before_lease`` and ``keeper``
                is made. An error here refuses the configuration, and nothing is left allocated.

        Returns:
            A function that ``forward_begin`` calls before it leases pages or changes anything,
            with the request slots of the decode rows, int64 ``[B]`` without padded ones; None for
            nothing. It may change these requests as calls between forwards do.
        """
