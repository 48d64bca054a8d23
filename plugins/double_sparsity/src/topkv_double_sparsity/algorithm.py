"""Double Sparsity: a few channels of a key show which tokens are worth attending.

Yang et al., "Post-Training Sparse Attention with Double Sparsity", arXiv 2408.07092.
Differences from its code: selection per kv-head (or shared) by the mean of the query heads'
softmaxed scores, normalised over a sample of the tokens, instead of per query head; channels are
chosen by a statistic of our own; the newest token is always attended; prefill is dense.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, RepresentationSpec
from topkv.ops.topk import topk
from topkv.types import LayerView, Selection
from topkv_authoring.selectors import closed_units, host_ids
from topkv_authoring.sticky import prefer_resident
from topkv_double_sparsity import reference, statistics
from topkv_double_sparsity.parameters import settings_of

MOST_HEADS = 128
"""Most query heads of a kv-head in all queries of a row, which are columns of one product."""


class DoubleSparsity:
    """Selects the tokens of the highest mean softmaxed approximate logit.

    The label of a key is r of its post-RoPE channels, per kv-head, in the keys' own dtype, or in 4
    bits with an fp16 scale and zero, beside which channels that reach much farther than the others
    are shifted and divided (``reference.ranges``). A query head scores a token by the sum of query
    times label over these channels; scores times ``model.scale`` go through a softmax over tokens
    ``0 .. length - 2``, in fp32, and are averaged over the query heads of the lane. In long
    requests a sample of the tokens normalises it (``reference.lane_scores``). The first
    ``sink_tokens`` are forced. Of equal scores the lower token wins. What is on the device already
    is worth ``sticky`` more.

    Channels and their ranges come from a calibration file, or from the first prompt chunk of each
    request, and are kept in request-grained pools then. A label depends on these and the key.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.model, self.group = setup.model, setup.group
        self.settings = settings_of(setup.model, setup.group, setup.params)
        self.fixed = self._fixed(setup.device)
        self.max_queries = setup.max_queries
        heads = self.model.group_size * self.max_queries
        if self.max_queries > 1 and heads > MOST_HEADS:
            reason = (
                f"a kv-head may have at most {MOST_HEADS} query heads, of all queries of a row, "
                f"got {heads}; lower max_queries"
            )
            raise ConfigError("double_sparsity", [reason])

    def _fixed(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Channels, int32 ``[layers of the group, Hkv, r]``, and their ranges, fp32 with a last
        dimension of 2, from the calibration file, if there is one."""
        settings, chosen, ranges = self.settings, [], []
        if settings.calibration is None:
            return None
        for layer in self.group.layers:
            importance = torch.tensor(settings.calibration.layers[layer], dtype=torch.float64)
            chosen.append(reference.choose(importance, settings.channels))
            ends = settings.calibration.ranges.get(layer)
            both = importance.new_zeros(2, *importance.shape) if ends is None else ends
            least, most = torch.as_tensor(both, dtype=torch.float32).gather(
                -1, chosen[-1].long().expand(2, -1, -1)
            )
            ranges.append(reference.ranges(least, most))
        return torch.stack(chosen).to(device), torch.stack(ranges).to(device)

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        heads, width = self.group.num_kv_heads, self.settings.channels
        if self.settings.int4:
            pools = [
                RepresentationSpec("labels", "token", (heads, (width + 1) // 2), torch.uint8),
                RepresentationSpec("meta", "token", (heads, 2), torch.float16),
            ]
        else:
            pools = [RepresentationSpec("labels", "token", (heads, width), self.model.dtype)]
        if self.fixed is None:
            pools.append(RepresentationSpec("channels", "request", (heads, width), torch.int32))
        if self.fixed is None and self.settings.int4:
            pools.append(RepresentationSpec("ranges", "request", (heads, width, 2), torch.float32))
        # The channels of a prompt depend on the queries of its first chunk, which nothing keeps.
        prefix = "none" if self.fixed is None else "pages"
        return AlgorithmSpec(representations=tuple(pools), prefix=prefix)

    def channels(self, layer: LayerView) -> Tensor:
        """Channels of every slot, int32 ``[max_requests, Hkv, r]``; stride 0 if all are alike."""
        if self.fixed is None:
            own: Tensor = layer.pools["channels"]
            return own
        return self.fixed[0][layer.index].expand(self.group.max_requests, -1, -1)

    def ranges(self, layer: LayerView) -> Tensor:
        """Ranges of every slot, fp32 ``[max_requests, Hkv, r, 2]``, of 4-bit labels."""
        if self.fixed is None:
            own: Tensor = layer.pools["ranges"]
            return own
        return self.fixed[1][layer.index].expand(self.group.max_requests, -1, -1, -1)

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        settings = self.settings
        if self.fixed is None and start == 0:
            chosen = reference.choose(statistics.of_prompt(q, k), settings.channels)
            layer.pools["channels"][slot] = chosen
            if settings.int4:
                ends = torch.stack([k.amin(0), k.amax(0)]).float()
                least, most = ends.gather(-1, chosen.long().expand(2, -1, -1))
                layer.pools["ranges"][slot] = reference.ranges(least, most)
        self._represent(layer, slot, start, k)

    def _represent(self, layer: LayerView, slot: int, start: int, k: Tensor) -> None:
        """Write labels of keys ``[m, Hkv, D]``, m > 0, from position ``start``."""
        tokens = start + torch.arange(k.shape[0], device=k.device)
        self._write(layer, torch.full_like(tokens, slot), tokens, k)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        step, nth = layer.step, torch.arange(k.shape[1], device=k.device)
        tokens = (step.lengths - step.appended).long()[:, None] + nth
        new = (step.slots >= 0)[:, None] & (tokens >= 0) & (nth < step.appended[:, None])
        slots = step.slots.long()[:, None].expand_as(tokens)
        self._write(layer, slots[new], tokens[new], k[new])

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        scores, closed = self.score(layer, self._queries(q))
        topk(scores, closed, out.ids, impl="reference")
        return out

    def _queries(self, q: Tensor) -> Tensor:
        """Queries ``[B, Q * H, D]`` of ``[B, Q, H, D]``: those of a kv-head are adjacent, and of
        them those of a query."""
        if q.shape[1] > self.max_queries:
            raise ValueError(
                f"double_sparsity: expected at most {self.max_queries} queries a row, got q "
                f"{list(q.shape)}"
            )
        if q.shape[1] > 1:
            q = (
                q.unflatten(2, (self.group.num_kv_heads, -1))
                .transpose(1, 2)
                .flatten(1, 3)[:, None]
            )
        return q[:, 0] if q.stride(-1) == 1 else q[:, 0].contiguous()

    def _write(self, layer: LayerView, slots: Tensor, tokens: Tensor, keys: Tensor) -> None:
        """Write labels of keys ``[n, Hkv, D]`` to the pools."""
        label = reference.gather(keys, self.channels(layer)[slots])
        at = host_ids(layer, slots, tokens)
        if self.settings.int4:
            narrowed = reference.narrowed(label, self.ranges(layer)[slots])
            layer.pools["labels"][at], layer.pools["meta"][at] = reference.quantize(narrowed)
        else:
            layer.pools["labels"][at] = label

    def score(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``[N, U]`` of queries ``[B, Q * H, D]``, and selectable tokens ``[N]``."""
        logits, closed = self._logits(layer, q)
        lane_heads, kv_heads = self.group.lane_heads, self.group.num_kv_heads
        nth = torch.arange(q.shape[1], device=q.device) % (q.shape[1] // kv_heads)
        real = nth // self.model.group_size < layer.step.appended.clamp(min=1)[:, None]
        scores = reference.lane_scores(logits, closed, lane_heads, self.settings.sinks, real)
        closed = closed.repeat_interleave(lane_heads)
        prefer_resident(layer, scores, closed, self.settings.sticky, impl="reference")
        return scores, closed

    def _logits(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled logits of the query heads, fp32 ``[B, H, U]``; selectable tokens ``[B]``."""
        step, group, settings = layer.step, self.group, self.settings
        closed = closed_units(layer)
        tokens = torch.arange(group.max_units, device=q.device).expand(step.batch, -1)
        # Behind the selectable tokens stands no page: read page 0, and mask it below.
        tokens = torch.where(tokens < closed[:, None], tokens, 0)
        slots = step.slots.clamp(min=0)
        at = host_ids(layer, slots[:, None], tokens)
        labels = layer.pools["labels"][at]
        if settings.int4:
            labels = reference.dequantize(labels, layer.pools["meta"][at], settings.channels)
            labels = labels * self.ranges(layer)[slots.long(), None, ..., 1]
        logits = reference.head_logits(q, self.channels(layer)[slots.long()], labels)
        return logits * self.model.scale, closed
