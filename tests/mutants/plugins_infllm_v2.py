"""InfLLM-v2 with one bug each."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from plugins.infllm_v2.tests.test_windows import check_scores, check_writing
from tests.mutants.lifecycle import LifecycleMutant
from topkv import hookimpl
from topkv_infllm_v2 import reference
from topkv_infllm_v2.algorithm import InfLLMv2
from topkv_infllm_v2.launch import InfLLMv2Triton

_window_scores, _lane_scores = reference.window_scores, InfLLMv2Triton.lane_scores


def without_the_one_before(windows, parts):
    """A window that begins in the unit before is not this one's."""
    return windows.unflatten(-1, (-1, parts)).amax(-1)


def parts_alone(q, means, parts, scale):
    """A window is its first part."""
    scores = [
        _window_scores(q, means[:, at : at + 1], (parts > at).int(), scale)
        for at in range(means.shape[1])
    ]
    return torch.cat(scores, dim=-1)


def logits_added(self, scores):
    """Query heads of a lane are added before they are softmaxed."""
    return scores.sum(2)


def open_parts_left_out(self, layer, q):
    """Windows of the open unit are not among those that are softmaxed."""
    step, unit = layer.step, self.group.unit
    lengths = step.lengths.clone()
    step.lengths.copy_((lengths - 1) // unit * unit + 1)
    try:
        return _lane_scores(self, layer, q)
    finally:
        step.lengths.copy_(lengths)


def of_the_next(means):
    """Every part has the mean of the one behind it."""
    return pad(means[:, :, 1:], (0, 0, 0, 1))


def shifted(keys, valid, stride):
    return of_the_next(_part_means(keys, valid, stride))


@hookimpl
def first_part_alone(self, layer, k, v):
    """A step writes the first part of the open unit, and no other."""
    group, step, ring = self.group, layer.step, self._rows(layer.ring_k)
    self.kernels.update_kernel[(step.batch, group.num_kv_heads, 1)](
        *(ring, ring, self._written(layer), step.slots, step.lengths, step.appended),
        *(step.page_table, step.page_table.stride(0), *layer.ring_k.stride()[:5]),
        HEADS_PER_LANE=group.heads_per_lane,
        T=group.ring_slots,
        **self.writing,
    )


_part_means = reference.part_means
INTERPRETED = ("interpret",)
BROKEN = {
    "windows before a block": (reference, "unit_scores", without_the_one_before, ("cpu",)),
    "windows of one part": (reference, "window_scores", parts_alone, ("cpu",)),
    "logits of heads added": (InfLLMv2, "combine", logits_added, ("cpu",)),
    "means of the next part": (reference, "part_means", shifted, ("cpu",)),
    "open parts left out": (InfLLMv2Triton, "lane_scores", open_parts_left_out, INTERPRETED),
}

MUTANTS = [
    *(
        LifecycleMutant(name, owner, method, broken, check_scores, tiers)
        for name, (owner, method, broken, tiers) in BROKEN.items()
    ),
    LifecycleMutant(
        "first part alone", InfLLMv2Triton, "update", first_part_alone, check_writing, INTERPRETED
    ),
]
