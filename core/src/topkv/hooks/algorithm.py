"""Hook specs of a selection algorithm.

The core makes one instance per group: ``factory(setup)`` with an ``AlgorithmSetup``; an entry
names a factory for each implementation. An instance keeps no state of a request: all of that lives
in the representation pools of ``spec``, which the core allocates and passes as ``layer.pools``.
``ScoredUnits`` of the package ``topkv-authoring`` implements this page for algorithms that score
units by what they keep of them, and leaves three methods to the author.

Of a model with an indexer (``capabilities.needs_index``, ``ModelShape.indexer``) keys are index
keys ``[.., 1, D^I]``, queries index queries ``[.., H^I, D^I]``, and ``weights`` those of the
index heads, see ``topkv.types.Index``. There is one index key a token, whatever the unit is.

``update``, ``retrieve_topk`` and ``correct`` are hot: no host sync, no allocation that a CUDA
graph cannot replay, no shape that depends on data, no Python per request. They run on the current
stream. Padded rows (slot -1) read and write nothing but their own rows of ``ids``. Rows of
queries, keys and values may have any stride; heads and the last dimension are adjacent.

Over the life of a request come ``construct`` for each prompt chunk, ``settle`` when a prompt
turns to decode and at every full period, then ``update`` and ``retrieve_topk`` in each step, and
``correct`` behind its attention. A fork copies what is keyed by slot and shares full pages;
``truncated`` reports a rollback or a truncation.

A row may verify several drafted tokens at once: it appends up to Q of them, and has a query for
each (``StepTensors.appended``). An algorithm states the largest Q that it takes
(``Capabilities.queries``) and gets the largest that will come (``max_queries`` of the setup). All
queries of a row share one selection a lane, made as if they were further query heads of the lane;
tokens that are rejected are rolled back, see ``truncated``. Where the setting ``verification`` is
``exact``, ``update``, ``retrieve_topk`` and ``correct`` are called for one query of each row after
the other: Q is 1 then, that token is the newest, and later ones stand in the ring behind it.

Pages are shared by forks, and by requests with equal first tokens where ``AlgorithmSpec.prefix``
allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Protocol

import torch
from attrs import field, frozen
from attrs.validators import ge, in_
from attrs.validators import optional as or_none
from torch import Tensor

from topkv.hooks.topk import TopK
from topkv.plugins.discovery import hookspec, optional
from topkv.types import GroupShape, LayerView, ModelShape, Selection

ORDERS = ("any", "score", "unit")
"""Orders of the ids of a selection, see ``AlgorithmSpec``."""


@frozen
class RepresentationSpec:
    """One pool that an algorithm keeps to score units with; the core allocates it.

    Attributes:
        name: key in ``LayerView.pools``.
        grain: ``"unit"``, ``"token"`` (both keyed by host id, copied, poisoned and shared
            with their page) or ``"request"`` (keyed by slot, copied by fork, reset at the end).
        shape: shape per unit, token or request.
        dtype: torch dtype.
        derived: ``construct`` over the keys of a page makes it again, so that it need not be
            stored with the page.
        packed: a page is laid out in an order of the algorithm's own, codes in front and scales
            behind them, say: its rows are no units or tokens, and only whole pages are compared.
    """

    name: str
    grain: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    derived: bool = True
    packed: bool = False

    @property
    def bytes(self) -> int:
        """Bytes per unit, token or request, in one layer."""
        return prod(self.shape) * self.dtype.itemsize


@frozen
class AlgorithmSpec:
    """Sizes and promises of an algorithm, which the core asks for before it allocates anything.

    Attributes:
        representations: its pools.
        settle_period: decode tokens between two calls of ``settle``, at least 1; None for never.
        settle_whole: ``settle`` gets the history from position 0, not from ``since``.
        generated: most tokens that may follow the prompt, for algorithms that choose once and
            have room for no more; the core refuses further ones. None for any number.
        ring_tokens: least tokens of the ring that ``update`` reads; 0 where two units do.
        prefix: what another request with the same first tokens may take over: ``"pages"``,
            representations included, because those of a page depend on its keys alone;
            ``"replay"``, after ``construct`` has seen the keys again; ``"none"``.
        prompt_tail: last prompt tokens that must be computed all the same, for algorithms that
            look at the queries of a prompt's end.
        undo: most tokens that ``truncated`` can take back where the algorithm accumulates over
            steps, what each token was attended, say. The core refuses to take back more. None for
            any number, as of algorithms that make what they keep of keys anew.
        scores: selections have scores where a stage reads them, see ``topkv.types.Selection``.
        order: order of the ids of a selection: ``"any"``; ``"score"``, best first; ``"unit"``,
            ascending. Entries of -1 stand behind all others unless it is ``"any"``.
        heads: heads that a selection depends on: ``"own"``, the heads of its lane and no others;
            ``"all"``, all heads of the layer, which no rank of several has; ``"none"``, none:
            it depends on places alone.
    """

    representations: tuple[RepresentationSpec, ...] = ()
    settle_period: int | None = field(default=None, validator=or_none(ge(1)))
    settle_whole: bool = False
    generated: int | None = field(default=None, validator=or_none(ge(0)))
    ring_tokens: int = field(default=0, validator=ge(0))
    prefix: str = field(default="pages", validator=in_(("pages", "replay", "none")))
    prompt_tail: int = field(default=0, validator=ge(0))
    undo: int | None = field(default=None, validator=or_none(ge(0)))
    scores: bool = False
    order: str = field(default="any", validator=in_(ORDERS))
    heads: str = field(default="own", validator=in_(("own", "all", "none")))


@frozen
class AlgorithmSetup:
    """The argument of an algorithm's factory.

    Attributes:
        model: geometry of the attention layers.
        group: the group as the algorithm sees it: in units of one token where a stage regrains.
        params: instance of ``PluginEntry.parameters`` with the values that hold here.
        device: where it will run.
        max_queries: most queries Q of a row.
        topk: ``topk(rows, columns, select)`` makes exact top-k with its scratch, for at most
            ``rows`` x ``columns`` scores, of the implementation that the configuration names.
            Pass it to ``topkv.ops.topk.topk``. Calls that share one must not overlap.
    """

    model: ModelShape
    group: GroupShape
    params: Any
    device: torch.device
    topk: Callable[[int, int, int], TopK]
    max_queries: int = 1


class History(Protocol):
    """The history of a request; each iteration streams it from the host anew."""

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Blocks ``(start, k [m, Hkv, D], v [m, Hkv, D])`` in order."""


class Algorithm(Protocol):
    """A selection algorithm of one group."""

    @hookspec
    def spec(self) -> AlgorithmSpec:
        """Representations and settle period. Cold, before any allocation."""

    @hookspec
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        """Write the representations of the units that a prefill chunk touched. Cold.

        Args:
            layer: the layer.
            slot: request slot (host int). Host ids follow from ``layer.step.page_table[slot]``.
            start: position of the first key, on a unit boundary.
            k: ``[m, Hkv, D]`` post-RoPE keys of positions ``start .. start + m``: the chunk and,
                before it, what the open unit already held. The last unit may be partial. An
                algorithm that has ``retrieve_prompt`` gets the chunk alone, from any position.
            v: ``[m, Hkv, Dv]`` their values.
            q: ``[c, H, D]`` post-RoPE queries of the chunk (the last c positions).
            lse: fp32 ``[c, H]`` natural log-sum-exp of their attention; empty for an algorithm
                that has ``retrieve_prompt``, which is asked before attention.

        Recomputes every touched unit from ``k``, never accumulates, so that a unit that was
        rolled back and written again keeps nothing of what was rejected.
        """

    @optional
    @hookspec
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: History
    ) -> None:
        """Close a prefill or a period. Cold, outside graphs.

        Args:
            layer: the layer.
            slot: request slot.
            since: first position that is new since the last settle.
            length: tokens of the request.
            history: from position ``since`` rounded down to a unit, or from 0 where the spec says
                ``settle_whole``.

        Full pages may be shared with a fork of the request, also of positions from ``since`` on,
        if it was forked in the middle of a period: what is keyed by page may be written only where
        it follows from the keys of the page alone. What depends on more of the request, or
        changes later, belongs into a pool of grain ``request``.
        """

    @hookspec
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        """Follow the tokens that each decode row appended. Hot.

        Args:
            layer: the layer; the open unit of a row is ring position
                ``((length - 1) // unit) % T`` and holds ``(length - 1) % unit + 1`` tokens, the
                new ones included. Rows with ``appended == 0`` change nothing.
            k, v: ``[B, Q, Hkv, D]`` post-RoPE keys, and values, of the new tokens; those from
                ``appended`` on are padding.

        Recomputes the units that got tokens from the ring, which has them all. An algorithm that
        takes units of one token alone has them in ``k``, and no ring where a stage regrains its
        selections: its ``layer.group`` is then in tokens, whatever the units are that are stored
        and attended.
        """

    @hookspec
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        """Select. Hot.

        Args:
            layer: the layer. Selectable are closed units ``0 .. (length - 1) // unit - 1`` of each
                row (``0 .. length - 1`` where the tail is selectable). Where rows have several
                queries, Q > 1, they are ``0 .. (length - max(appended, 1)) // unit - 1`` in any
                case, for the others are attended anyway.
            q: ``[B, Q, H, D]`` post-RoPE queries.
            weights: fp32 ``[B, Q, H^I]`` of a model whose indexer has weights, else None.
            out: memory for the selection, owned by the core: ``ids`` int32 ``[N, K]``, and
                ``scores`` fp32 ``[N, K]`` where the spec says that there are some and a stage
                reads them, else None.

        Returns:
            The selection, every element defined: ``out``, or tensors of its own of the same
            shapes, which nobody writes until the next call for a layer of the group.
        """

    @optional
    @hookspec
    def correct(
        self, layer: LayerView, q: Tensor, selection: Selection, out: Tensor, lse: Tensor
    ) -> None:
        """Correct the attention output in place by an estimate for units that were left out. Hot.

        With part and part_lse for the units that were left out, attention over both is
        ``(exp(lse) * out + exp(part_lse) * part) / (exp(lse) + exp(part_lse))``: the estimate
        stands for the left units alone, for a unit that is in both counts twice.

        Args:
            layer: the layer.
            q: ``[B, Q, H, D]`` post-RoPE queries.
            selection: as the last of algorithm and stages left it, only read. Attended are its
                units, and those that stand behind the selectable ones: the open one as a rule.
            out: ``[B, Q, H, Dv]`` in the dtype of q, rows at any stride: the attention output.
                Where nothing was left out, and in padded rows, it stays as it is, to the bit.
            lse: fp32 ``[B, Q, H]``, contiguous: its natural log-sum-exp, -inf in padded rows.
        """

    @optional
    @hookspec
    def retrieve_prompt(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        q: Tensor,
        weights: Tensor | None,
        ids: Tensor,
    ) -> None:
        """Select for the rows of a prompt chunk, where the model itself is sparse there too. Cold.

        Called after ``construct`` of the chunk, and only where a row can reach more than W units.
        W is K where the tail is selectable. Where it is forced, W is K + 1: a row lists the unit
        that it is in, too. Of that unit it sees no later token.

        Args:
            layer: the layer.
            slot: request slot.
            start: position of the first row.
            q: ``[m, H^I, D^I]`` index queries of positions ``start ..``.
            weights: fp32 ``[m, H^I]``, or None where the model's scores have none.
            ids: int32 ``[m, lane_heads, W]``, owned by the core, contiguous, every element to be
                written: of row i unique units of ``0 .. (start + i) // unit``, -1 anywhere.
        """

    @optional
    @hookspec
    def truncated(self, layer: LayerView, slot: int, length: int) -> None:
        """Follow a request that lost its tokens from ``length`` on, by rollback, truncation, or a
        forward that was dropped. Cold.

        For algorithms that derive request state from decoded tokens. Representations of units need
        nothing: a unit that is written again is represented again. One that accumulates over steps
        keeps what it had before each of the last ``AlgorithmSpec.undo`` tokens, in a pool of grain
        ``"request"`` by position, and goes back to it here. A step that was dropped has
        accumulated for the token behind ``length``, too.

        Args:
            layer: the layer.
            slot: request slot.
            length: tokens that are left.
        """
