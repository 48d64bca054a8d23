"""The Transformers engine, broken in one place where it meets the core or the model."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

from transformers import AttentionInterface
from transformers.models.llama import modeling_llama

from tests.mutants.harness import Mutant, name_of
from tests.packaging.packages import ROOT
from topkv import hookimpl
from topkv.entries import PluginEntry
from topkv_testing.engines import EngineTests
from topkv_transformers import attention, forwards, support
from topkv_transformers.engine import TransformersEngine
from topkv_transformers.requests import CacheRequests
from topkv_transformers.session import AttachedModel

sys.path.append(str(ROOT / "plugins/transformers/tests"))  # whose modules import each other
from plugins.transformers.tests.test_conformance import LLAMA


class _Broken(TransformersEngine):
    """Attaches with other classes of a session and of its requests."""

    session: type[AttachedModel] = AttachedModel
    requests: type[CacheRequests] = CacheRequests

    @hookimpl
    def attach(self, model: Any, config: Any) -> Any:
        with (
            patch("topkv_transformers.engine.AttachedModel", self.session),
            patch("topkv_transformers.session.CacheRequests", self.requests),
        ):
            return super().attach(model, config)


class KeepsPadding(_Broken):
    """Appends left padding as if it were tokens."""

    class requests(CacheRequests):
        def open(self, state: Any, rows: int, columns: int, mask: Any) -> None:
            state.padding[:] = 0
            super().open(state, rows, columns, None)


class CountsTheLastTokenTwice(_Broken):
    """Takes the prompt's last token for appended once more when the prompt is through."""

    class requests(CacheRequests):
        def end_forward(self, completed: bool) -> bool:
            forward = self.forward
            ended = super().end_forward(completed)
            if forward and completed and forward.chunks is not None:
                state = forward.state
                if state.seen >= state.prompt:
                    self.coordinator.requests.length[state.slots] += 1
            return ended


class KeepsRequestsOnException(_Broken):
    """Drops the forward after an exception, and forgets to end its requests."""

    class requests(CacheRequests):
        def truncate(self, state: Any, columns: int) -> None:
            self.abandon()
            state.slots = []


class LeavesTheForwardOpen(_Broken):
    """Does not abort the coordinator's forward after an exception."""

    class requests(CacheRequests):
        def _recover(self) -> None:
            self._close_forward()


class LeavesHooks(_Broken):
    """Leaves its hooks on the decoder when it is detached."""

    class session(AttachedModel):
        def detach(self) -> None:
            self._hooks = []
            super().detach()


class LeavesTheAttention(_Broken):
    """Leaves its attention function in the model's config when it is detached."""

    class session(AttachedModel):
        def detach(self) -> None:
            super().detach()
            self._decoder.config._attn_implementation = attention.NAME


class TakesTheAttentionAway(_Broken):
    """Unregisters the attention function, which all attached models share, with the first."""

    class session(AttachedModel):
        def detach(self) -> None:
            if self.attached:
                AttentionInterface._global_mapping.pop(attention.NAME, None)
            super().detach()


class SwapsRows(_Broken):
    """Hands the decode rows over in the order of the batch, and their slots backwards."""

    class session(AttachedModel):
        def __init__(self, model: Any, coordinator: Any) -> None:
            super().__init__(model, coordinator)
            begin = coordinator.forward_begin
            coordinator.forward_begin = lambda decode=(), **others: begin(decode[::-1], **others)


class DecodesTheLastChunk(_Broken):
    """Takes a last chunk of one token for a decode step."""

    class requests(CacheRequests):
        def open(self, state: Any, rows: int, columns: int, mask: Any) -> None:
            def is_prefill(state: Any, columns: int) -> bool:
                return columns > 1 or state.seen == 0

            with patch.object(forwards, "is_prefill", is_prefill):
                super().open(state, rows, columns, mask)


class KeepsKeysUnrotated(_Broken):
    """Hands over keys as they are before RoPE."""

    class requests(CacheRequests):
        _rope: Any = None

        def open(self, *args: Any) -> None:
            super().open(*args)
            real = modeling_llama.apply_rotary_pos_emb

            def rotate(q: Any, k: Any, *tables: Any, **options: Any) -> Any:
                return real(q, k, *tables, **options)[0], k

            self._rope = patch.object(modeling_llama, "apply_rotary_pos_emb", rotate)
            self._rope.start()

        def _close_forward(self) -> Any:
            rope, self._rope = self._rope, None
            if rope:
                rope.stop()
            return super()._close_forward()


class LosesSlotsWhenFull(_Broken):
    """Keeps the slots of the first rows when there is none for the last."""

    class requests(CacheRequests):
        def _all_or_none(self) -> Any:
            return nullcontext()


class EndsRequestsByHalf(_Broken):
    """Gives slot and pages back, and leaves the maps of the buffer to the next request."""

    class session(AttachedModel):
        def __init__(self, model: Any, coordinator: Any) -> None:
            super().__init__(model, coordinator)
            requests = coordinator.requests

            def end(slot: int) -> None:
                requests.pages.shrink(slot, 0)
                requests.active[slot] = False

            coordinator.request_end = end


class DropsAnInterruptedForward(_Broken):
    """Does not give the model its own attention back when no hook has closed the forward."""

    class requests(CacheRequests):
        def _recover(self) -> None:
            self.attention.own = None
            super()._recover()


class RunsEmptyForwards(_Broken):
    """Opens and closes the coordinator's forward once before the real one."""

    class requests(CacheRequests):
        def open(self, *args: Any) -> None:
            self.coordinator.forward_begin()
            self.coordinator.forward_end()
            super().open(*args)


class AttachesTwice(TransformersEngine):
    """Does not look whether a model is attached already."""

    @hookimpl
    def refusals(self, model: object) -> list[str]:
        return [reason for reason in support.refusals(model) if "already" not in reason]

    @hookimpl
    def attach(self, model: Any, config: Any) -> Any:
        with patch("topkv_transformers.engine.refusals", self.refusals):
            return super().attach(model, config)


class ChangesTheModelFirst(TransformersEngine):
    """Changes the model before the configuration is checked."""

    @hookimpl
    def attach(self, model: Any, config: Any) -> Any:
        model.config._attn_implementation = attention.NAME
        handle = super().attach(model, config)
        model.config._attn_implementation = "sdpa"
        return handle


class TakesAnything(TransformersEngine):
    """Finds no reason against whatever it is asked about."""

    @hookimpl
    def refusals(self, model: object) -> list[str]:
        return []


def _mutant(broken: type, test: str) -> Mutant:
    return Mutant(
        name=name_of(broken),
        suite=EngineTests,
        test=test,
        broken=PluginEntry("broken", "engine", f"{__name__}:{broken.__name__}"),
        clean=PluginEntry("clean", "engine", "topkv_transformers.engine:TransformersEngine"),
        options=LLAMA,
    )


MUTANTS = [
    _mutant(KeepsPadding, "test_a_covering_budget_is_the_model_itself"),
    _mutant(KeepsKeysUnrotated, "test_a_covering_budget_is_the_model_itself"),
    _mutant(SwapsRows, "test_rows_are_independent"),
    _mutant(DecodesTheLastChunk, "test_the_swap_path_is_exact"),
    _mutant(DecodesTheLastChunk, "test_every_token_is_appended_once"),
    _mutant(CountsTheLastTokenTwice, "test_every_token_is_appended_once"),
    _mutant(KeepsRequestsOnException, "test_an_exception_gives_everything_back"),
    _mutant(LeavesTheForwardOpen, "test_an_exception_gives_everything_back"),
    _mutant(LeavesHooks, "test_detach_restores_the_model"),
    _mutant(LeavesTheAttention, "test_detach_restores_the_model"),
    _mutant(TakesTheAttentionAway, "test_two_models_do_not_disturb_each_other"),
    _mutant(DropsAnInterruptedForward, "test_detach_after_an_exception"),
    _mutant(EndsRequestsByHalf, "test_slots_and_pages_are_used_again"),
    _mutant(RunsEmptyForwards, "test_observers_see_every_forward"),
    _mutant(AttachesTwice, "test_a_second_handle_is_refused"),
    _mutant(LosesSlotsWhenFull, "test_exhaustion_is_a_typed_error"),
    _mutant(ChangesTheModelFirst, "test_a_configuration_that_does_not_fit_is_refused"),
    _mutant(TakesAnything, "test_what_is_no_model_is_refused"),
]
