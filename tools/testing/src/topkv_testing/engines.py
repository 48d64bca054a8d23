"""The suite of engines: an attached model is the model itself, but for what it selects.

An author says in an ``EngineCase`` how to make a model, to generate with it, and to run it plainly
in float64::

    class TestMine(EngineTests):
        @pytest.fixture
        def plugin(self):
            return "mine"

        @pytest.fixture
        def options(self):
            return MyCase()

The suite plugs in a selection, a backend and an observer of its own, so that it depends on no
other plugin.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from topkv.errors import CapabilityError, ConfigError, HostMemoryError, OutOfMemory, PluginError
from topkv_testing.engine.bench import PAGE, SWAPPING, UNIT, Bench
from topkv_testing.engine.case import EngineCase as EngineCase
from topkv_testing.engine.state import changes
from topkv_testing.kit import KitTests, Subject, examples
from topkv_testing.strategies import lengths, seeds

LONG, RAGGED = 61, (61, 6, 37)


class Interruption(Exception):
    """Raised by the suite in the middle of a forward."""


def _steps(subject: Subject) -> int:
    return 4 if subject.tier.name == "interpret" else 10


def _prompts() -> st.SearchStrategy[list[int]]:
    return st.lists(lengths(UNIT, PAGE, LONG), min_size=1, max_size=3)


def _chunks() -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.sampled_from([1, 3, UNIT, 15, PAGE, PAGE + 1, LONG - 1]))


def _scopes() -> st.SearchStrategy[str]:
    return st.sampled_from(["kv_head", "shared"])


class Before:
    """A model that is not attached: its state, and what it generates."""

    def __init__(self, bench: Bench, model: Any, prompts: list[list[int]], steps: int) -> None:
        self.bench, self.given = bench, (model, prompts, steps)
        self.tokens, self.logits = bench.case.generate(*self.given)
        self.state = bench.case.state(model)

    def check(self) -> None:
        """Assert that the model is whole again."""
        _assert_unchanged(self.bench, self.given[0], self.state)
        tokens, logits = self.bench.case.generate(*self.given)
        assert tokens == self.tokens, "the model gives other tokens than before"
        assert torch.equal(logits, self.logits), "the model is not what it was, bit for bit"


class EngineTests(KitTests):
    """Every test of an engine. The fixture ``options`` gives an ``EngineCase``."""

    kind = "engine"

    def test_a_covering_budget_is_the_model_itself(self, subject: Subject) -> None:
        """With a budget that covers the sequence, the logits are those of the model."""
        bench, steps = Bench(subject), _steps(subject)

        @examples(subject.tier, cpu=16, interpret=1)
        @example(RAGGED, True, None, [], 0)
        @example((LONG,), False, 15, [0], 1)
        @given(_prompts(), st.booleans(), _chunks(), st.sampled_from([[], [0]]), seeds())
        def check(
            rows: list[int], fast: bool, chunk: int | None, dense: list[int], seed: int
        ) -> None:
            chunk = chunk if bench.case.chunked else None
            with bench.attached(resident_fast_path=fast, dense_layers=dense) as attached:
                assert attached.allowed(LONG, steps) is None
                attached.generate(bench.prompts(rows, seed), steps, chunk)

        check()

    def test_the_swap_path_is_exact(self, subject: Subject) -> None:
        """Through a buffer that is far too small, the logits are those of the selection."""
        bench, steps = Bench(subject), _steps(subject)

        @examples(subject.tier, cpu=16, interpret=1)
        @example(RAGGED, True, None, "kv_head", 0)
        @example((LONG, 48), False, LONG - 1, "shared", 1)
        @given(
            _prompts(), st.booleans(), _chunks(), st.sampled_from(["kv_head", "shared"]), seeds()
        )
        def check(rows: list[int], fast: bool, chunk: int | None, scope: str, seed: int) -> None:
            chunk = chunk if bench.case.chunked else None
            with bench.attached(resident_fast_path=fast, scope=scope, **SWAPPING) as attached:
                attached.generate(bench.prompts(rows, seed), steps, chunk)
                if min(rows) > 40:
                    attached.assert_evicted(len(rows))

        check()

    def test_the_case_is_sharp(self, subject: Subject) -> None:
        """The oracle's logits of a selection differ from dense ones, else nothing is tested."""
        bench = Bench(subject)
        prompt, new = bench.prompts([LONG, 4])
        with bench.attached(**SWAPPING) as attached:
            allowed = attached.allowed(len(prompt), len(new))
            ask = (attached.twin, prompt, new, torch.float64)
            selected, dense = (bench.case.dense_logits(*ask, each) for each in (allowed, None))
        apart = ((selected - dense).abs().max() / dense.abs().max()).item()
        assert apart > 1e-2, f"selected and dense logits differ by {apart:.1e}: larger weights"

    def test_rows_are_independent(self, subject: Subject) -> None:
        """A request gets the same tokens alone, in a ragged batch, and in another order."""
        bench, steps = Bench(subject), _steps(subject)
        prompts = bench.prompts(RAGGED, seed=2)
        with bench.attached(**SWAPPING) as attached:
            together = attached.generate(prompts, steps)
            backwards = attached.generate(prompts[::-1], steps)
            alone = [attached.generate([prompt], steps)[0] for prompt in prompts]
        assert together == backwards[::-1], "the order of the rows changes their tokens"
        assert together == alone, "the other rows of a batch change the tokens of a request"

    def test_slots_and_pages_are_used_again(self, subject: Subject) -> None:
        """Call after call over the same slots and poisoned pages is as good as a fresh model."""
        bench, steps = Bench(subject), _steps(subject)
        calls = [bench.prompts(rows, seed) for seed, rows in enumerate([(61, 37), (5, 44), (18,)])]
        pages = -(-LONG // PAGE) * PAGE + 2 * PAGE
        fresh = []
        for prompts in calls:
            with bench.attached(max_requests=2, max_tokens=pages, **SWAPPING) as attached:
                fresh.append(attached.generate(prompts, steps))
        with bench.attached(max_requests=2, max_tokens=pages, **SWAPPING) as attached:
            again = [attached.generate(prompts, steps) for prompts in calls]
        assert again == fresh, "a call changes the tokens of the next one"

    def test_an_exception_gives_everything_back(self, subject: Subject) -> None:
        """Raised between the layers of a prompt or of a step, it ends the requests of the call."""
        bench, steps = Bench(subject), _steps(subject)
        prompts = bench.prompts((37, 6))
        with bench.attached(**SWAPPING) as attached:
            for error in (Interruption("injected"), KeyboardInterrupt()):
                for decode, calls in ((False, 1), (False, 2), (True, 1), (True, 3)):
                    attached.fail(error, decode, calls)
                    with pytest.raises(BaseException) as caught:  # noqa: PT011
                        bench.case.generate(attached.model, prompts, steps)
                    assert _caused_by(caught.value, error), f"{error!r} became {caught.value!r}"
                    attached.assert_all_free()
                attached.generate(prompts[::-1], steps)

    def test_detach_after_an_exception(self, subject: Subject) -> None:
        """The model is whole again although its last forward was never finished."""
        bench, steps = Bench(subject), _steps(subject)
        model, prompts = bench.model(), bench.prompts((37, 6))
        before = Before(bench, model, prompts, steps)
        for decode in (False, True):
            with bench.attached(model, **SWAPPING) as attached:
                attached.fail(KeyboardInterrupt(), decode, 2)
                with pytest.raises(BaseException):  # noqa: B017, PT011
                    bench.case.generate(model, prompts, steps)
            before.check()

    def test_detach_restores_the_model(self, subject: Subject) -> None:
        """The model gives what it gave before, bit for bit; detach is idempotent."""
        bench, steps = Bench(subject), _steps(subject)
        model, prompts = bench.model(), bench.prompts(RAGGED)
        before = Before(bench, model, prompts, steps)
        handle = bench.engine().attach(model, bench.config(**SWAPPING))
        bench.case.generate(model, prompts, steps)
        for _ in range(2):
            handle.detach()
            before.check()
        with bench.attached(model) as attached:
            attached.generate(prompts, steps)

    def test_two_models_do_not_disturb_each_other(self, subject: Subject) -> None:
        """Both are right while both are attached, and one is after the other is detached."""
        one, two = Bench(subject, seed=1), Bench(subject, seed=2)
        steps, prompts = _steps(subject), one.prompts((37, 6))
        with two.attached(**SWAPPING) as second:
            with one.attached(**SWAPPING) as first:
                expected = [each.generate(prompts, steps) for each in (first, second)]
                again = first.generate(prompts, steps)
                assert again == expected[0], "another attached model changes the tokens"
            again = second.generate(prompts, steps)
            assert again == expected[1], "detaching another model changes the tokens"

    def test_what_is_no_model_is_refused(self, subject: Subject) -> None:
        """``refusals`` and ``attach`` refuse it with reasons; they take a model."""
        bench = Bench(subject)
        engine, config = bench.engine(), bench.config()
        for thing in (object(), None, torch.nn.Linear(2, 2)):
            reasons = engine.refusals(thing)
            assert reasons, f"{thing!r} was not refused"
            assert all(isinstance(reason, str) and reason for reason in reasons)
            before = bench.case.state(thing)
            with pytest.raises(CapabilityError) as refused:
                engine.attach(thing, config)
            assert refused.value.reasons, "refused without a reason"
            _assert_unchanged(bench, thing, before)
        model = bench.model()
        before = bench.case.state(model)
        assert engine.refusals(model) == [], "the model of the case is refused"
        _assert_unchanged(bench, model, before)

    def test_a_second_handle_is_refused(self, subject: Subject) -> None:
        """A model that is attached stays with the handle that it has."""
        bench, steps = Bench(subject), _steps(subject)
        with bench.attached(**SWAPPING) as attached:
            assert bench.engine().refusals(attached.model), "an attached model is not refused"
            with pytest.raises(CapabilityError):
                bench.engine().attach(attached.model, bench.config())
            attached.generate(bench.prompts((37,)), steps)
        assert bench.engine().refusals(attached.model) == [], "refused after detach"

    def test_a_configuration_that_does_not_fit_is_refused(self, subject: Subject) -> None:
        """Refused before anything changes: the model is as it was, and can be attached."""
        bench, steps = Bench(subject), _steps(subject)
        model, prompts = bench.model(), bench.prompts((6, 18))
        before = Before(bench, model, prompts, steps)
        for wrong, error in (
            ({"buffer": UNIT}, ConfigError),
            ({"unit": 3}, ConfigError),
            ({"ring_tokens": UNIT}, ConfigError),
            ({"algorithm": "nobody"}, (ConfigError, PluginError)),
            ({"dense_layers": [2**20]}, ConfigError),
            ({"host_memory": 1024}, (ConfigError, HostMemoryError)),
        ):
            with pytest.raises(error):
                bench.engine().attach(model, bench.config(**wrong))
            _assert_unchanged(bench, model, before.state)
        before.check()
        with bench.attached(model, **SWAPPING) as attached:
            attached.generate(prompts, steps)

    def test_exhaustion_is_a_typed_error(self, subject: Subject) -> None:
        """No room for prompts, for tokens to come, or for rows: nothing stays leased."""
        bench, steps = Bench(subject), _steps(subject)
        room = {"max_tokens": 4 * PAGE, "max_request_tokens": 4 * PAGE, "max_requests": 2}
        with bench.attached(**room, **SWAPPING) as attached:
            pages = attached.coordinator.manager.host.free
            full = [pages // 2 * PAGE, (pages - pages // 2) * PAGE]
            for rows, error in (
                ((4 * PAGE, 4 * PAGE), HostMemoryError),
                (tuple(full), HostMemoryError),  # the prompts fit, and not one token more
                ((6, 6, 6), OutOfMemory),
            ):
                prompts = bench.prompts(rows)
                with pytest.raises(error):
                    bench.case.generate(attached.model, prompts, steps)
                attached.assert_all_free()
            attached.generate(bench.prompts((37, 6)), steps)

    def test_every_token_is_appended_once(self, subject: Subject) -> None:
        """Observers see the prompt's tokens in prefill, and one token a step."""
        bench, steps = Bench(subject), _steps(subject)
        chunks = [None, LONG - 1, UNIT] if bench.case.chunked else [None]
        with bench.attached() as attached:  # it selects all: only the counts separate prefill
            for chunk in chunks:
                attached.generate(bench.prompts(RAGGED), steps, chunk)
                attached.assert_appended(RAGGED, steps)

    def test_observers_see_every_forward(self, subject: Subject) -> None:
        """Each forward begins and ends once, with the same rows, and slots that exist."""
        bench, steps = Bench(subject), _steps(subject)
        with bench.attached(**SWAPPING) as attached:
            attached.generate(bench.prompts(RAGGED), steps)
            watcher, requests = attached.watcher, attached.coordinator.config.max_requests
        ended = [(forward.slots, forward.prefill_tokens) for forward in watcher.ended]
        assert watcher.began == ended, f"began {watcher.began}, ended {ended}"
        assert len(ended) >= steps, f"{steps} tokens in {len(ended)} forwards"
        for slots, tokens in ended:
            live = [slot for slot in slots if slot >= 0]
            assert live or tokens, "a forward without a row"
            assert len(set(live)) == len(live), f"slots {slots}: one is named twice"
            assert all(-1 <= slot < requests for slot in slots), f"slots {slots} of {requests}"


def _assert_unchanged(bench: Bench, model: object, before: dict[str, Any]) -> None:
    left = changes(before, bench.case.state(model))
    assert not left, f"changed and not restored: {left}"


def _caused_by(caught: BaseException | None, error: BaseException) -> bool:
    while caught is not None and caught is not error:
        caught = caught.__cause__ or caught.__context__
    return caught is error
