"""Stages that stand for options of attention: options reach the backend, or are refused."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve, frozen

from topkv.assembly.stages import Staged
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError, PluginError
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.stage import StageSpec
from topkv.plugins.discovery import hookimpl
from topkv_testing.machines.lifecycle_model import SPARSE, doubles
from topkv_testing.models.doubles import GATHER, Scripted
from topkv_testing.stages import AlgorithmOptions, OptionTests


class Coarse:
    """An option, "coarse", with a number."""

    def __init__(self, setup):
        if setup.params.by == setup.group.unit:
            raise ConfigError("coarse", [f"by must not be the unit, got {setup.params.by}"])

    @hookimpl
    def spec(self):
        return StageSpec()


class Holding(Coarse):
    """``Coarse`` with a pool, which nothing would write."""

    @hookimpl
    def spec(self):
        return StageSpec((RepresentationSpec("rows", "unit", (1,), torch.float32),))


@frozen
class CoarseParams:
    """Parameters of ``Coarse``."""

    by: int = 3
    much: bool = True


COARSE = PluginEntry(
    "coarse",
    "stage",
    f"{__name__}:Coarse",
    capabilities=Capabilities(options=("coarse",)),
    parameters=CoarseParams,
)
HOLDING = evolve(COARSE, name="holding", factories=f"{__name__}:Holding")
IDLE = evolve(COARSE, name="idle", capabilities=Capabilities())
ABLE = evolve(
    GATHER, name="able", capabilities=evolve(GATHER.capabilities, options=("fine", "coarse"))
)
REGISTRY = doubles(COARSE, HOLDING, IDLE, ABLE, evolve(COARSE, name="other"))


class TestCoarse(OptionTests):
    @pytest.fixture
    def plugin(self):
        return COARSE

    @pytest.fixture
    def options(self):
        return AlgorithmOptions()


@pytest.fixture
def made(make):
    return lambda **options: make(**{"registry": REGISTRY, "backend": "able", **options})


def asked(coordinator):
    return [dict(path.backend.options) for path in coordinator.layers]


def test_the_backend_of_sparse_layers_gets_every_parameter(made):
    found = asked(made(stages=[{"name": "coarse", "params": {"by": 5}}]))
    assert found == [{"coarse": CoarseParams(by=5)}, {}, {}, {"coarse": CoarseParams(by=5)}]
    assert asked(made()) == [{}] * 4


def test_other_parameters_make_another_group(made):
    one, two = ([{"name": "coarse", "params": {"by": by}}] for by in (1, 3))
    layers = {"1": "resident", "2": "streamed", "3": {"stages": two}}
    found = asked(made(stages=one, layers=layers))
    assert [getattr(each.get("coarse"), "by", None) for each in found] == [1, None, None, 3]


def test_no_algorithm_knows_of_it(made):
    coordinator = made(stages=["coarse"])
    assert [type(coordinator.layers[layer].algorithm) for layer in SPARSE] == [Scripted] * 2
    assert coordinator.memory() == made().memory()


@pytest.mark.parametrize("stages", [["keep", "coarse"], ["coarse", "keep"]])
def test_it_goes_with_stages_that_refine(made, stages):
    path = made(stages=stages).layers[0]
    assert type(path.algorithm) is Staged
    assert [link.prefix for link in path.algorithm.links] == [f"stages[{stages.index('keep')}]."]
    assert path.backend.options == {"coarse": CoarseParams()}


def refused(made, kind=ConfigError, **options):
    with pytest.raises(kind) as error:
        made(**options)
    return error.value.reasons


def test_a_backend_without_the_option_is_refused_beside_other_reasons(made):
    found = refused(made, backend="gather", stages=["coarse", "absent"], unit=3)
    assert any(
        "(backend 'gather') has no coarse, which stage 'coarse' asks of attention: choose another "
        "backend, or leave the stage out (layers 0,3, sparse)" in why
        for why in found
    ), found
    assert len(found) > 2


def test_an_option_has_one_value(made):
    (why,) = refused(made, stages=["coarse", "keep", "other"])
    assert why == (
        "option 'coarse' of attention is set by 2 stages, 'coarse', 'other'; leave one "
        "(layers 0,3)"
    )


def test_users_set_parameters_and_not_options(made):
    (why,) = refused(made, stages=[{"name": "coarse", "options": ["fine"]}])
    assert "unknown key 'options'" in why


def test_the_stage_refuses_its_parameters_before_a_backend_is_made(made):
    (why,) = refused(made, stages=[{"name": "coarse", "params": {"by": 2}}])
    assert why == "by must not be the unit, got 2"


@pytest.mark.parametrize(
    ("name", "part"), [("idle", "names no option"), ("holding", "neither representations")]
)
def test_a_stage_that_would_do_nothing_is_refused(made, name, part):
    (why,) = refused(made, PluginError, stages=[name])
    assert part in why
