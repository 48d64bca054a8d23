"""The block index of MiniMax-M3 with one bug each."""

from __future__ import annotations

from plugins.trained_gate.tests import test_conformance as kit
from plugins.trained_gate.tests.test_decode import test_rows_attend_to_the_blocks_of_their_heads
from tests.mutants import plugins
from tests.mutants.lifecycle import LifecycleMutant
from topkv import hookimpl
from topkv.ops.chunk_attention import Chosen
from topkv_trained_gate import algorithm
from topkv_trained_gate.algorithm import TrainedGate
from topkv_trained_gate.launch import TrainedGateTriton

_unit_scores, _with_local = algorithm.unit_scores, algorithm.with_local
_blocks, _columns, _score = TrainedGate.prompt_blocks, Chosen.columns, TrainedGateTriton._score


def by_the_mean(q, keys, unit):
    """A block is worth the mean of its tokens."""
    scores = q.float() @ keys.float().transpose(-1, -2)
    return scores.unflatten(-1, (-1, unit)).mean(-1)


def by_the_first_head(q, keys, unit):
    """All heads select what the first one does."""
    return _unit_scores(q[:, :1].expand_as(q), keys, unit)


def nothing_local(scores, ends, local):
    """The block before the own one competes like any other."""
    return _with_local(scores, ends, min(local, 1) - (local == 1))


def without_own(self, start, rows, heads, device):
    """The block that a prompt row is in is not listed."""
    for at, ends in _blocks(self, start, rows, heads, device):
        yield at, (ends - 1).clamp(min=1)


def of_the_first_lane(self, rows, lane, first, count):
    """Rows of a prompt see in every lane what the first lane has selected."""
    return _columns(self, rows, 0, first, count)


def a_head_too_few(self, layer, q, rows, scores, ends, sizes):
    """Programs of prompts leave the last head out."""
    scores.fill_(float("-inf"))
    fewer = {"BLOCK_H": 2} if sizes["PROMPT"] else {}
    _score(self, layer, q, rows, scores, ends, {**sizes, **fewer})


def prompts_begin_at_zero(self, layer, q, rows, scores, ends, sizes):
    """Rows of a later chunk take themselves for the first."""
    _score(self, layer, q, (rows[0], 0, rows[2]), scores, ends, sizes)


class AnswersInReverse(TrainedGate):
    """The first kv-head gets what the last one selects, and so on."""

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        super().retrieve_topk(layer, q, weights, out)
        out.ids.copy_(out.ids.unflatten(0, (-1, self.heads)).flip(1).flatten(0, 1))
        return out


class PromptsInReverse(TrainedGate):
    """Rows of prompts get what steps select, for other heads."""

    @hookimpl
    def retrieve_prompt(self, layer, slot, start, q, weights, ids):
        super().retrieve_prompt(layer, slot, start, q, weights, ids)
        ids.copy_(ids.flip(1))


ANYWHERE, INTERPRETED = ("cpu", "interpret"), ("interpret",)
of_kit = plugins._kit("trained_gate", TrainedGateTriton, kit.OPTIONS)

BROKEN = {
    "blocks by their mean": (algorithm, "unit_scores", by_the_mean, ("cpu",)),
    "heads alike": (algorithm, "unit_scores", by_the_first_head, ("cpu",)),
    "no local blocks": (algorithm, "with_local", nothing_local, ("cpu",)),
    "own block not listed": (TrainedGate, "prompt_blocks", without_own, ("cpu",)),
    "columns of the first lane": (Chosen, "columns", of_the_first_lane, ANYWHERE),
    "a head too few": (TrainedGateTriton, "_score", a_head_too_few, INTERPRETED),
    "chunks from zero": (TrainedGateTriton, "_score", prompts_begin_at_zero, INTERPRETED),
}

MUTANTS = [
    *(
        LifecycleMutant(
            name, owner, method, broken, test_rows_attend_to_the_blocks_of_their_heads, tiers
        )
        for name, (owner, method, broken, tiers) in BROKEN.items()
    ),
    of_kit(AnswersInReverse, "needle_in_a_prompt", ANYWHERE),
    of_kit(AnswersInReverse, plugins.ORACLE),
    of_kit(PromptsInReverse, "prompt_rows_select_what_decode_steps_select"),
]
