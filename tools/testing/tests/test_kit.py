"""Base of the conformance kit: its guard, its tiers, and its reasons for skips."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import topkv_testing
from tests.mutants.harness import without_shrinking
from topkv.entries import TIERS, TRAITS, Capabilities
from topkv.errors import PluginError
from topkv.plugins.discovery import hookimpl
from topkv_authoring.selectors import host_ids
from topkv_testing.algorithms import AlgorithmTests
from topkv_testing.differences import difference
from topkv_testing.doubles import GATHER, SCRIPTED
from topkv_testing.host_reads import no_host_reads
from topkv_testing.kit import KitTests, examples, subject_of
from topkv_testing.models.indexed import INDEXED, Indexed
from topkv_testing.tiers import all_tiers, tier
from topkv_testing.tolerance import assert_as_good


def test_what_the_kit_promises_can_be_imported():
    promised = topkv_testing.__doc__.partition("What these are made of")[0]
    found = re.findall(r"``(?:topkv_testing\.)?(\w+)(?:\.(\w+))?``", promised)
    assert {("algorithms", "AlgorithmTests"), ("engines", "EngineTests"), ("oracle", "")} <= {
        *found
    }
    for module, name in found:
        page = import_module(f"topkv_testing.{module}")
        assert not name or hasattr(page, name), f"{module}.{name}"


@pytest.mark.parametrize("name", ["cache_model", "doubles", "oracle"])
def test_models_keep_their_public_path(name):
    model, page = (import_module(f"topkv_testing.{path}") for path in (f"models.{name}", name))
    own = {
        key
        for key, value in vars(model).items()
        if key.isupper() or getattr(value, "__module__", None) == model.__name__
    }
    assert {*page.__all__} == {key for key in own if not key.startswith("_")}
    assert all(getattr(page, key) is getattr(model, key) for key in page.__all__)


class Suite(KitTests):
    kind = "backend"

    def test_something(self, subject):
        """A test of the kit."""


def test_a_test_of_the_kit_cannot_be_replaced():
    with pytest.raises(TypeError, match=r"Mine.test_something overrides a test of the conform"):

        class Mine(Suite):
            def test_something(self, subject):
                """Passes, whatever the plugin does."""


def test_a_known_failure_says_so_strictly():
    class Mine(Suite):
        @pytest.mark.xfail(reason="a bug of ours, number 7", strict=True)
        def test_something(self, subject):
            super().test_something(subject)

        def test_more(self, subject):
            """A test of one's own."""

    for mark in (pytest.mark.xfail(reason="one day"), pytest.mark.xfail(strict=True)):
        with pytest.raises(TypeError, match="overrides a test"):
            type("Vague", (Suite,), {"test_something": mark(lambda self, subject: None)})
    assert Mine.kind == "backend"


def test_two_suites_in_one_class():
    class Other(KitTests):
        kind = "backend"

        def test_another_thing(self, subject):
            """Another test of the kit."""

    class Both(Suite, Other):
        pass

    assert {"test_something", "test_another_thing"} <= set(dir(Both))


def test_skips_name_what_is_lacking():
    on = tier("cpu")
    entry = evolve(GATHER, name="mine", capabilities=Capabilities(tiers=("gpu",)))
    with pytest.raises(pytest.skip.Exception, match="mine does not state the tier 'cpu'"):
        subject_of(entry, "backend", on)
    with pytest.raises(ValueError, match="kind 'backend', got 'algorithm'"):
        subject_of(SCRIPTED, "backend", on)
    subject = subject_of(evolve(SCRIPTED, name="mine"), "algorithm", on)
    with pytest.raises(pytest.skip.Exception, match="does not state the trait 'nested'"):
        subject.require("nested")
    for missing in (each for each in all_tiers() if each.missing):
        with pytest.raises(pytest.skip.Exception, match=f"tier '{missing.name}'"):
            subject_of(evolve(GATHER, name="mine"), "backend", missing)


def test_entries_state_known_tiers_and_traits():
    assert [each.name for each in all_tiers()] == list(TIERS)

    def stating(**values):
        entry = evolve(GATHER, name="mine", capabilities=Capabilities(**values))
        return subject_of(entry, "backend", tier("cpu"))

    stating(traits=tuple(TRAITS))
    for wrong in ({"tiers": ("tpu",)}, {"traits": ("fast",)}):
        with pytest.raises(PluginError, match="must be a tuple of any of"):
            stating(**wrong)


def test_examples_follow_tier_and_profile():
    few, many = (examples(tier(name), cpu=100, interpret=50) for name in ("interpret", "cpu"))
    assert many.max_examples == settings().max_examples == 2 * few.max_examples
    assert examples(tier("cpu"), cpu=0, interpret=0).max_examples == 1
    assert few.deadline is None


MINE = """
import pytest
from topkv_authoring.selectors import host_ids
from topkv_testing.algorithms import AlgorithmTests

class TestMine(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return "mine"
"""


class Collected:
    def pytest_collection_finish(self, session):
        self.names = [item.originalname for item in session.items]


def test_what_says_most_of_a_mistake_runs_first(tmp_path):
    (tmp_path / "test_mine.py").write_text(MINE)
    found = Collected()
    quiet = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    assert pytest.main(["--collect-only", *quiet, str(tmp_path)], plugins=[found]) == 0
    names = list(dict.fromkeys(found.names))
    assert names[:2] == ["test_ids_are_well_formed", "test_length_edges"]
    first = names.index("test_needle_in_a_prompt")
    assert first < names.index("test_rows_do_not_see_each_other")
    assert names.index("test_selections_are_those_of_the_oracle") < first
    assert names[-1] == "test_decode_step_replays_from_a_graph"


@pytest.mark.parametrize("name", ["interpret", "gpu"])
def test_failures_of_kernels_are_not_made_smaller_for_minutes(name):
    calls = []

    @examples(tier(name), cpu=15, interpret=15)
    @given(st.lists(st.integers(0, 10**6), min_size=3))
    def check(drawn):
        calls.append(drawn)
        assert sum(drawn) < 10**5

    with pytest.raises(AssertionError):
        check()
    assert len(calls) <= 20, "calls of a test that failed at once"


class RoundsSteps(Indexed):
    """Decode keeps a key in half of the digits that a prompt keeps."""

    @hookimpl
    def update(self, layer, k, v):
        super().update(layer, k.bfloat16().to(k.dtype), v)


def test_a_difference_is_reported_by_pool_row_and_size():
    entry = evolve(INDEXED, name="mine", factories=f"{__name__}:{RoundsSteps.__name__}")
    subject = subject_of(entry, "algorithm", tier("cpu"))
    with without_shrinking(), pytest.raises(AssertionError) as caught:
        AlgorithmTests().test_decode_builds_what_a_prompt_builds(subject)
    reported = str(caught.value)
    assert re.match(
        r"decode from \d+: pool 'index' differs in \d+ of \d+ rows; worst is row", reported
    )
    assert "ULP" in reported
    assert "tensor(" not in reported
    assert len(reported) < 300


class CodesOfThePrompt(Indexed):
    """Decode stores the nearest of the first two keys: a codebook that is trained once."""

    @hookimpl
    def update(self, layer, k, v):
        k = k.clone()
        for row, slot in enumerate(layer.step.slots.tolist()):
            if slot >= 0:
                book = layer.pools["index"][host_ids(layer, slot, torch.arange(2))]
                nearest = (book - k[row].double()).square().sum(-1).nan_to_num(torch.inf).argmin()
                k[row] = book[nearest].to(k.dtype)
        super().update(layer, k, v)


class MirroredByValues(Indexed):
    """Keys of tokens whose values are negative are kept the other way round."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        side = v.flatten(1).float().mean(1).sign().to(k.dtype)
        super().construct(layer, slot, start, k * side[:, None, None], v, q, lse)


@pytest.mark.parametrize(
    ("trait", "double", "test", "reported"),
    [
        ("incremental", CodesOfThePrompt, "unit_is_found_as_soon_as_decode_closes_it", "needle"),
        ("value_free", MirroredByValues, "values_never_matter", "with other values"),
    ],
)
def test_what_an_algorithm_does_not_promise_is_not_asked(trait, double, test, reported):
    stated = INDEXED.capabilities.traits
    assert trait in stated
    fewer = tuple(each for each in stated if each != trait)
    for traits, error in ((stated, AssertionError), (fewer, pytest.skip.Exception)):
        capabilities = evolve(INDEXED.capabilities, traits=traits)
        factories = dict.fromkeys(INDEXED.impls, f"{__name__}:{double.__name__}")
        entry = evolve(INDEXED, name="mine", factories=factories, capabilities=capabilities)
        subject = subject_of(entry, "algorithm", tier("cpu"))
        match = trait if error is not AssertionError else reported
        with without_shrinking(), pytest.raises(error, match=match):
            getattr(AlgorithmTests(), f"test_{test}")(subject)


def test_differences_of_bits_that_are_equal_numbers_count():
    one = torch.tensor([[1.0, 2.0], [0.0, torch.nan]])
    other = torch.tensor([[1.0, 2.0], [-0.0, torch.nan]])
    assert difference(one, one.clone()) is None
    assert "differs in 1 of 2 rows; worst is row 1, element [0]: 0.0 instead" in difference(
        one, other
    )
    assert "not finite" in difference(one, one.nan_to_num())
    up = torch.nextafter(one, torch.full_like(one, torch.inf))
    assert "(1 ULP, 2.38e-07 apart)" in difference(up[:1], one[:1])
    assert "expected torch.float32 [1, 2]" in difference(one, one[:1])


X = torch.arange(6.0)

READS = {
    "item": lambda: X.sum().item(),
    "int": lambda: int(X.sum()),
    "bool": lambda: bool(X.sum() > 0),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "nonzero": lambda: (X > 2).nonzero(),
    "where of one argument": lambda: torch.where(X > 2),
    "mask": lambda: X[X > 2],
    "write through a mask": lambda: X.clone().__setitem__(X > 2, X[3:]),
    "masked_select": lambda: X.masked_select(X > 2),
    "unique": lambda: X.unique(),
    "counts": lambda: X.repeat_interleave(torch.ones(6, dtype=torch.long)),
    "equal": lambda: torch.equal(X, X),
}

STAYS = {
    "where": lambda: torch.where(X > 2, X, 0.0),
    "fill through a mask": lambda: X.clone().__setitem__(X > 2, 0.0),
    "gather": lambda: X[torch.tensor([1, 2])],
    "repeat": lambda: X.repeat_interleave(2),
    "topk": lambda: X.topk(2),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_host_reads_are_refused(read):
    with no_host_reads(), pytest.raises(AssertionError, match="in a hot hook"):
        read()
    read()


@pytest.mark.parametrize("call", STAYS.values(), ids=STAYS)
def test_what_stays_on_the_device_is_let_through(call):
    with no_host_reads():
        call()


def test_tolerance_follows_the_rough_result():
    truth = torch.tensor([1.0, 2.0, -torch.inf], dtype=torch.float64)
    rough = torch.tensor([1.01, 2.0, -torch.inf])
    assert_as_good(torch.tensor([1.019, 2.0, -torch.inf]), truth, rough)
    for wrong in ([1.03, 2.0, -torch.inf], [1.0, 2.0, 0.0], [float("nan"), 2.0, -torch.inf]):
        with pytest.raises(AssertionError):
            assert_as_good(torch.tensor(wrong), truth, rough)
