"""RocketKV: the end of a prompt drops most of it, and steps select among the rest.

Behnam, Fu, Zhao, Tsai, Yu, Tumanov: "RocketKV: Accelerating Long-Context LLM Inference via
Two-Stage KV Cache Compression", ICML 2025, arXiv 2502.14051. The README says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, History, RepresentationSpec
from topkv.types import LayerView
from topkv_authoring import votes
from topkv_authoring.selectors import ScoredUnits, closed_units
from topkv_authoring.votes import Voting
from topkv_rocketkv import reference
from topkv_rocketkv.entry import RocketParams
from topkv_rocketkv.split import capacity, channels

MOST_CHANNELS, MOST_HEADS = 256, 64
"""Largest D, and most query heads of a kv-head, whose queries a program of the kernels holds."""

SETTLED, UNREAD = range(2)
"""Columns of the pool ``state``: whether a settle came since the last prompt chunk; channels that
a step does not read."""


class RocketKV(Voting, ScoredUnits):
    """Drops units by the votes of a prompt, and selects the best of the others.

    Pool of grain unit: ``bounds [Hkv, 2, D]``, minimum and maximum of the unit's keys, packed by
    page as ``reference.by_page`` says. Pools of grain request, in each layer, beside those of
    ``voters``:
        dropped int8 ``[lanes, units]``: 1 where a unit holds no token that the lane keeps.
        state int32 ``[2]``: see ``SETTLED``, ``UNREAD``.
    Zeros stand for a request that drops nothing and reads all channels.

    ``construct`` takes queries up, ``settle`` reads the history once and chooses. Generated tokens
    are never dropped, until a later prompt votes over them.
    """

    params: RocketParams

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.attended = (self.group.select + 1) * self.group.unit

    def refusals(self) -> list[str]:
        reasons, params, dim = [], self.params, self.model.head_dim
        prompt, read = params.prompt_budget, params.channels
        least = max((self.group.select + 1) * self.group.unit, params.window + 1)
        if prompt is not None and prompt < least:
            reasons.append(
                f"prompt_budget must be None or an integer of {least} or more, which is what a "
                f"step attends, and the window and one token; got {prompt!r}; raise it, or lower "
                "budget or window"
            )
        if read is not None and read > dim:
            reasons.append(f"channels must be None or an integer of 1 to {dim}, got {read}")
        heads = self.model.group_size * self.max_queries
        if heads > MOST_HEADS:
            reasons.append(
                f"a kv-head may have at most {MOST_HEADS} query heads, of all queries of a row, "
                f"got {heads}; lower max_queries"
            )
        if dim > MOST_CHANNELS:
            reasons.append(
                f"head_dim must be at most {MOST_CHANNELS}, got {dim}; select by another algorithm"
            )
        return reasons

    def representations(self) -> list[RepresentationSpec]:
        shape = (self.group.num_kv_heads, 2, self.group.head_dim)
        return [RepresentationSpec("bounds", "unit", shape, self.model.dtype, packed=True)]

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        shape = (self.group.lane_heads, self.group.max_units)
        dropped = RepresentationSpec("dropped", "request", shape, torch.int8)
        state = RepresentationSpec("state", "request", (2,), torch.int32)
        return AlgorithmSpec(
            (*self.representations(), *self.voters(), dropped, state),
            settle_whole=True,
            prompt_tail=self.params.window,
        )

    def sizes(self, length: int) -> tuple[int, int]:
        """Tokens that are kept of a prompt, and channels that its steps read."""
        params, budget = self.params, 2 * self.attended
        if params.prompt_budget is None:
            held = capacity(length, budget, params.generated)
            kept = max(held - params.generated, self.attended, params.window + 1)
        else:
            kept = params.prompt_budget
            held = min(kept + params.generated, length)
        read = channels(self.model.head_dim, self.group.unit, held, budget)
        return kept, params.channels or read

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        super().construct(layer, slot, start, k, v, q, lse)
        settled = layer.pools["state"][slot, SETTLED]
        self.gather_voters(layer, slot, start, k, q, lse, settled)

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: History
    ) -> None:
        pools, window, unit = layer.pools, self.params.window, self.group.unit
        kept, read = self.sizes(length)
        dropped, state = pools["dropped"][slot], pools["state"][slot]
        state[SETTLED], state[UNREAD] = 1, self.model.head_dim - read
        if length <= kept:
            dropped.zero_()
            return
        front = length - window
        mass = self.votes(layer, slot, length, history)[:, :front]
        # Where the whole window was cut off nobody votes, and what was kept before stays.
        before = (1 - dropped.float()).repeat_interleave(unit, 1)[:, :front]
        scores = votes.pooled(mass, self.params.kernel)
        scores = torch.where((mass > 0).any(), scores, before)
        tokens = reference.best(scores, kept - window)
        tokens = torch.nn.functional.pad(tokens, (0, window), value=True)
        holds = reference.units_of(tokens, unit)
        dropped.zero_()
        dropped[:, : holds.shape[1]] = (~holds).to(torch.int8)

    @hookimpl
    def truncated(self, layer: LayerView, slot: int, length: int) -> None:
        """Forget drops and voters from position ``length`` on."""
        voters = layer.pools["voters"][slot]
        voters *= voters <= length
        layer.pools["dropped"][slot, :, length // self.group.unit :] = 0

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"bounds": reference.minmax(keys, valid)}

    def _write(
        self, layer: LayerView, slots: Tensor, units: Tensor, valid: Tensor, *rows: Tensor
    ) -> None:
        per_page, writes = self.group.units_per_page, slots >= 0
        table = layer.step.page_table[slots.clamp(min=0), units // per_page].long()
        # Without a shape that depends on data: the others write page 0, which belongs to nobody.
        page, place = torch.where(writes, table, 0), torch.where(writes, units % per_page, 0)
        bounds = reference.by_page(layer.pools["bounds"], per_page)
        new = self.represent(*rows, valid)["bounds"]
        bounds[page, place] = torch.where(writes[:, None, None, None], new, bounds[page, place])

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        return reference.head_scores(q, kept["bounds"], kept["count"]) * self.model.scale

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, pools = self.group, layer.pools
        step, real = layer.step, self.real_heads(layer, q)
        q = torch.where(real[..., None], q, 0)  # padding chooses no channels
        slots, per_page = step.slots.clamp(min=0).long(), group.units_per_page
        closed = closed_units(layer)
        unit = torch.arange(group.max_units, device=q.device)
        selectable = unit < closed[:, None]
        units = torch.where(selectable, unit, 0)
        page = step.page_table[slots[:, None], units // per_page].long()
        kept = {
            "bounds": reference.by_page(pools["bounds"], per_page)[page, units % per_page],
            "count": self.model.head_dim - pools["state"][slots, UNREAD],
        }
        scores = self.score(q, kept)
        none = ~real[..., None] | ~selectable[:, None]
        scores, none = (x.unflatten(1, (group.lane_heads, -1)) for x in (scores, none))
        dropped = pools["dropped"][slots].bool()[:, :, None]
        scores = scores.masked_fill(dropped, reference.DROPPED)
        scores = scores.masked_fill(none, float("-inf"))
        return self.combine(scores).flatten(0, 1), closed.repeat_interleave(group.lane_heads)
