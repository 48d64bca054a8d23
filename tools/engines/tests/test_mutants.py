"""Rules of padding, settling, drafts, memory and counts, each broken on purpose: the test beside
it must fail."""

from __future__ import annotations

import inspect
import textwrap
from importlib import import_module

import pytest

from tools.engines.tests import test_ahead as ahead
from tools.engines.tests import test_counts as counts
from tools.engines.tests import test_drafts as drafts
from tools.engines.tests import test_graphs as graphs
from tools.engines.tests import test_memory as buffers
from tools.engines.tests import test_padding as tests
from tools.engines.tests import test_settling as settling
from topkv_engines import lengths, memory, rows
from topkv_engines.ahead import Ahead, reasons_against
from topkv_engines.counts import Counts
from topkv_engines.graphs import LayerRows, RecordedCoordinator
from topkv_engines.requests import Requests
from topkv_engines.session import Session


def rewritten(function, old, new):
    """A function with one change of its source, which must have ``old`` once."""
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(
            f"{function.__qualname__} must have {old!r} once, got {source.count(old)} times; "
            "follow its change in the mutant"
        )
    made = {}
    exec(compile(source.replace(old, new), "<mutant>", "exec"), function.__globals__, made)
    return made[function.__name__]


def failure_of(test, *arguments):
    """Return how a test fails; None if it passes. A test that does not run has seen nothing."""
    try:
        test(*arguments)
    except (AttributeError, NameError, TypeError):
        raise
    except Exception as failure:
        return failure
    return None


PADS = "slots + [-1] * pads"
LAST = "[*(each.slot for each in self.held.values()), *[-1] * count][:count]"
CLOSES = "            requests.close()"
BEHIND = (
    CLOSES
    + "\n            requests.coordinator.settle([each.slot for each in requests.held.values()])"
)
BEFORE = "try:\n            requests.settle()"

JOINT, REFERENCE = ("joint", "cpu"), ("cpu", "reference")

MUTANTS = {
    "a dummy run replays the rows of the last step": (
        *(Requests.pad, "[-1] * count", LAST),
        *(tests.test_a_dummy_run_changes_nothing,),
    ),
    "a dummy run leaves its forward open for the next one": (
        *(Requests.pad, "self.coordinator.forward_abort()", "pass"),
        *(tests.test_a_dummy_run_changes_nothing,),
    ),
    "a dummy run uploads nothing": (
        *(Session.forward, "requests.pad(count, queries)", "pass"),
        *(tests.test_a_dummy_run_changes_nothing,),
    ),
    "a step finds the forward of a dummy run open": (
        *(Session.run, "requests.abort()  # padding", "pass  # padding"),
        *(tests.test_a_dummy_run_changes_nothing,),
    ),
    "a dummy run of prompts opens a forward": (
        *(Session.forward, "queries not in (1, self.coordinator.config.max_queries)", "False"),
        *(tests.test_dummy_runs_of_prompts_and_before_there_is_a_coordinator_attend_to_nothing,),
    ),
    "padding in front of requests": (
        *(Requests.forward, PADS, "[-1] * pads + slots"),
        *(tests.test_padded_rows_change_nothing, 1),
    ),
    "padding belongs to the first slot that is free": (
        *(Requests.forward, PADS, "slots + [self.coordinator.request_begin()] * pads"),
        *(tests.test_padded_rows_change_nothing, 1),
    ),
    "padding belongs to the last request": (
        *(Requests.forward, PADS, "slots + slots[-1:] * pads"),
        *(tests.test_padded_rows_change_nothing, 1),
    ),
    "rows of padding are not in the forward": (
        *(Requests.forward, PADS, "slots"),
        *(tests.test_padded_rows_change_nothing, 2),
    ),
    "a step with prompts is padded too": (
        *(Requests.forward, "0 if chunks else ", ""),
        *(tests.test_padded_rows_change_nothing, 1),
    ),
    "rows in the order of the scheduler": (
        *(Session.forward, "self.row_names()[:count]", "[*requests.tokens]"),
        *(tests.test_rows_in_any_order, 0),
    ),
    "a chunk is behind all rows that decode": (
        *(Requests.forward, "place == (n * queries, queries)", "place[1] == queries"),
        *(tests.test_rows_in_any_order, 0),
    ),
    "a chunk is as long as a row": (
        *(Requests.forward, "row += tokens", "row += 1"),
        *(tests.test_rows_in_any_order, 0),
    ),
    "the last token of a prompt decodes": (
        *(Requests.decodes, "self.computed[name] >=", "self.tokens[name] == 1 or 0 >="),
        *(tests.test_steps_with_prompts_are_kept_apart_from_those_that_decode,),
    ),
    "the first token behind a prompt does not decode": (
        *(Requests.decodes, ">=", ">"),
        *(tests.test_steps_with_prompts_are_kept_apart_from_those_that_decode,),
    ),
    "a prompt among rows that decode is not seen": (
        *(Requests.has_prompts, "not all", "self.tokens and not any"),
        *(tests.test_steps_with_prompts_are_kept_apart_from_those_that_decode,),
    ),
    "a step is still there when it has ended": (
        *(Requests.close, "self.tokens, self.order = {}, None", "pass"),
        *(tests.test_a_dummy_run_changes_nothing,),
    ),
    "an exception leaves the forward open": (
        *(Session.run, "requests.abort()\n            raise", "raise"),
        *(tests.test_an_exception_behind_the_last_layer_drops_the_step,),
    ),
    "a step that only decodes does not offload": (
        *(Session.attend, "coordinator.offload()", "pass"),
        *(tests.test_units_that_steps_fill_are_on_the_host, 1),
    ),
    "it offloads before all layers have run": (
        *(Session.attend, "model.layers[-1]", "model.layers[0]"),
        *(tests.test_units_that_steps_fill_are_on_the_host, 1),
    ),
    "a step with prompts does not offload": (
        *(Requests.close, "not forward.chunks", "True"),
        *(tests.test_units_that_steps_fill_are_on_the_host, 0),
    ),
    "sinks are left out where rows have an order of their own": (
        *(Session.attend, ", sinks=sinks)", ")"),
        *(drafts.test_drafts_are_attended_to_and_taken_back,),
    ),
    "sinks are left out": (
        *(Session.attend, "index, out, sinks)", "index, out)"),
        *(drafts.test_drafts_are_attended_to_and_taken_back,),
    ),
    "a rejected draft stays": (
        *(Requests._take_back, "if lengths:", "if False:"),
        *(drafts.test_drafts_are_attended_to_and_taken_back,),
    ),
    "what one that is left out has verified is taken back": (
        *(
            Requests._take_back,
            "self.computed[name] for name in self.tokens",
            "self.computed[name] for name in self.held",
        ),
        *(drafts.test_drafts_are_attended_to_and_taken_back,),
    ),
    "drafts of all rows are taken back by the length of the first": (
        *(Requests._take_back, "[*lengths.values()]", "[min(lengths.values())] * len(lengths)"),
        *(drafts.test_drafts_are_attended_to_and_taken_back,),
    ),
    "rows of fewer drafts have those of the next request behind them": (
        *(rows.order, "np.minimum(np.arange(queries), tokens - 1)", "np.arange(queries)"),
        *(drafts.test_drafts_are_attended_to_and_taken_back,),
    ),
    "requests of other numbers of drafts are taken for alike": (
        *(Requests.forward, "(n * queries, queries)", "(n * queries, place[1])"),
        *(drafts.test_drafts_are_attended_to_and_taken_back,),
    ),
    "outputs of drafts stay in topkv's order": (
        *(Session.attend, "order.given, out", "order.taken[: len(order.given)], out"),
        *(drafts.test_drafts_are_attended_to_and_taken_back,),
    ),
    "lengths of a step that is ahead stay the host's": (
        *(Session.forward, "self.ahead is not None and lengths is not None", "False"),
        *(ahead.test_outputs_are_those_of_an_engine_that_knows, *JOINT),
    ),
    "lengths are corrected once and not in later steps": (
        *(lengths.correct, "length.copy_(", "length.add(0).copy_("),
        *(ahead.test_an_upload_is_that_of_the_right_lengths, *REFERENCE),
    ),
    "limits stay those of the counted lengths": (
        *(lengths.correct, "block[row].copy_(", "block[row].add(0).copy_("),
        *(ahead.test_an_upload_is_that_of_the_right_lengths, *REFERENCE),
    ),
    "rows of single queries keep their lengths": (
        *(lengths.correct, "1 + (queries > 1 and len(uploader.singles))", "1"),
        *(ahead.test_an_upload_is_that_of_the_right_lengths, *REFERENCE),
    ),
    "rows of padding get lengths": (
        *(lengths.correct, "(length - lost).where(live, length)", "length - lost"),
        *(ahead.test_an_upload_is_that_of_the_right_lengths, *REFERENCE),
    ),
    "the newest token of a single query cannot be selected": (
        *(lengths.correct, "(number > 0 or queries == 1)", "queries == 1"),
        *(ahead.test_an_upload_is_that_of_the_right_lengths, *REFERENCE),
    ),
    "the newest token of several queries can be selected": (
        *(lengths.correct, "(number > 0 or queries == 1)", "True"),
        *(ahead.test_an_upload_is_that_of_the_right_lengths, *REFERENCE),
    ),
    "rows that decode have the lengths of those in front": (
        *(Ahead.correct, "decoded[-1] >= len(decoded)", "False"),
        *(ahead.test_rows_between_prompts_are_found,),
    ),
    "places of rows that decode are counted among themselves": (
        *(Requests.forward, "self.decoded.append(place)", "self.decoded.append(len(slots))"),
        *(ahead.test_rows_between_prompts_are_found,),
    ),
    "drafts of one step at most are taken back": (
        *(Requests._take_back, "< 2 * self.", "< self."),
        *(ahead.test_a_request_that_is_left_out_for_a_step_loses_the_drafts_of_two,),
    ),
    "warming up forgets lengths": (
        *(Ahead.warm_up, ":1].clone()", ":1] * 0 + 1"),
        *(ahead.test_warming_up_changes_no_length,),
    ),
    "algorithms that settle in between are served ahead": (
        *(reasons_against, "spec.settle_period or ", ""),
        *(ahead.test_what_counts_on_the_host_is_refused,),
    ),
    "algorithms that follow rejected tokens on the host are served ahead": (
        *(reasons_against, ' or has_hook(algorithm, "truncated")', ""),
        *(ahead.test_what_counts_on_the_host_is_refused,),
    ),
    "stages that follow requests on the host are served ahead": (
        *(reasons_against, 'has_hook(link.stage, "bind")', "False"),
        *(ahead.test_what_counts_on_the_host_is_refused,),
    ),
    "a ring reaches back as far as without steps ahead": (
        *(reasons_against, "2 * config.max_queries", "config.max_queries"),
        *(ahead.test_a_ring_that_does_not_reach_back_is_refused,),
    ),
    "it settles within the step": (
        *(Session.run, "requests.settle()", "pass"),
        *(settling.test_nothing_is_settled_within_a_step, pytest.MonkeyPatch),
    ),
    "it settles behind the step, those that end with it too": (
        *(Session.run, CLOSES, BEHIND),
        *(settling.test_a_request_that_ends_with_its_prompt_is_not_settled, pytest.MonkeyPatch),
    ),
    "it settles prompts that are not through": (
        *(Requests.settle, " if self.decodes(name)", ""),
        *(settling.test_nothing_is_settled_within_a_step, pytest.MonkeyPatch),
    ),
    "an exception while it settles leaves the step": (
        *(Session.run, BEFORE, "requests.settle()\n        try:"),
        *(settling.test_an_exception_while_it_settles_drops_the_step, pytest.MonkeyPatch),
    ),
    "a graph of fewer rows is replayed": (
        *(
            RecordedCoordinator._replay,
            "(len(forward.rows) - 1).bit",
            "-1 + len(forward.rows).bit",
        ),
        *(graphs.test_replays_are_what_python_does,),
    ),
    "a step that only decodes is replayed by layers": (
        *(RecordedCoordinator._replay, "not forward.chunks or ", ""),
        *(graphs.test_replays_are_what_python_does,),
    ),
    "a graph of one query is replayed for several": (
        *(RecordedCoordinator._replay, "size, forward.queries", "size, 1"),
        *(graphs.test_replays_are_what_python_does,),
    ),
    "other sinks than recorded are replayed": (
        *(RecordedCoordinator._replay, "sinks is not self._sinks.get(layer)", "False"),
        *(graphs.test_other_sinks_than_recorded_are_not_replayed,),
    ),
    "layers that share a selection are recorded": (
        *(RecordedCoordinator.record, "if shared or", "if"),
        *(graphs.test_layers_that_share_a_selection_are_not_recorded,),
    ),
    "a replay has the values of the step before": (
        *(LayerRows.take, ", (self.v, v))", ")"),
        *(graphs.test_replays_are_what_python_does,),
    ),
    "a report waits for the device": (
        *(Counts.take, "(held and not self._look.ready)", "False"),
        *(counts.test_what_has_not_come_is_reported_later, pytest.MonkeyPatch),
    ),
    "the last report is of an earlier look": (
        *(Counts.take, "not held or (", "("),
        *(counts.test_what_has_not_come_is_reported_later, pytest.MonkeyPatch),
    ),
    "one look is reported again and again": (
        *(Counts.take, "self._look, self._before = None, total", "self._before = total"),
        *(counts.test_reports_add_up_to_what_the_coordinator_counts, pytest.MonkeyPatch),
    ),
    "a warm-up is counted": (
        *(Counts.reset, "self._begin = self._before", "pass"),
        *(counts.test_counts_before_a_reset_are_forgotten, pytest.MonkeyPatch),
    ),
    "a warm-up is reported": (
        *(Counts.reset, "self.take()", "pass"),
        *(counts.test_counts_before_a_reset_are_forgotten, pytest.MonkeyPatch),
    ),
    "a report has all counts so far": (
        *(Counts.take, "self._look, self._before = None, total", "self._look = None"),
        *(counts.test_reports_add_up_to_what_the_coordinator_counts, pytest.MonkeyPatch),
    ),
    "the prompt buffer takes all that is left": (
        *(memory.with_prompt_buffer, "(room - least) // 2 * 16", "(room - least) * 16"),
        *(buffers.test_the_prompt_buffer_has_half_of_what_is_left_and_no_more_than_a_request,),
    ),
    "the prompt buffer is longer than a request": (
        *(memory.with_prompt_buffer, "min(config.max_request_tokens, ", "max(0, "),
        *(buffers.test_the_prompt_buffer_has_half_of_what_is_left_and_no_more_than_a_request,),
    ),
}


def owner_of(function):
    """Class or module that a function is an attribute of."""
    module = import_module(function.__module__)
    name = function.__qualname__.rpartition(".")[0]
    return getattr(module, name) if name else module


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name, monkeypatch):
    function, old, new, test, *arguments = MUTANTS[name]
    monkeypatch.setattr(owner_of(function), function.__name__, rewritten(function, old, new))
    arguments = [monkeypatch if each is pytest.MonkeyPatch else each for each in arguments]
    failure = failure_of(test, *arguments)
    assert failure, f"{name}: it survived"
    print(f"{name}: {type(failure).__name__}: {str(failure)[:160]}")
