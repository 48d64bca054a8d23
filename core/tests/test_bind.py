"""Stages that are bound to a coordinator, and what they have called before each forward."""

from __future__ import annotations

from typing import ClassVar

import pytest

from topkv.entries import PluginEntry
from topkv.errors import ConfigError
from topkv.hooks.stage import StageSpec
from topkv.plugins.discovery import hookimpl
from topkv_testing.machines.lifecycle_model import doubles, make_coordinator
from topkv_testing.tiers import tier


class Watching:
    """Notes what it is bound to, and what a coordinator has leased when it is called."""

    bound: ClassVar[list] = []
    seen: ClassVar[list] = []
    called = True

    def __init__(self, setup):
        self.bound.clear()
        self.seen.clear()

    @hookimpl
    def spec(self):
        return StageSpec(prefix="none")

    @hookimpl
    def bind(self, coordinator):
        self.bound.append((coordinator, self))
        return self.note if self.called else None

    def note(self, slots):
        coordinator, _ = self.bound[0]
        self.seen.append((slots.tolist(), coordinator.manager.host.used))


class Silent(Watching):
    """Wants nothing called."""

    called = False


class Refusing(Watching):
    """Refuses any coordinator."""

    @hookimpl
    def bind(self, coordinator):
        close = coordinator.manager.close
        coordinator.manager.close = lambda: self.seen.append("closed") or close()
        raise ConfigError("refused", ["it is a Tuesday"])


def make(cls, **options):
    entry = PluginEntry("bound", "stage", f"{__name__}:{cls.__name__}")
    options = {"stages": ["bound"], **options}
    return make_coordinator(tier("cpu"), registry=doubles(entry), **options)


def test_a_stage_is_bound_once_a_group_and_called_before_pages_are_leased():
    coordinator = make(Watching, layers={"1": "resident", "2": "streamed", "3": {"unit": 1}})
    assert [each for each, _ in Watching.bound] == [coordinator] * 2
    links = [path.algorithm.links for path in coordinator.layers if path.selector]
    assert [stage for _, stage in Watching.bound] == [link.stage for (link,) in links]
    slots = [coordinator.request_begin() for _ in range(2)]
    coordinator.reserve(slots[0], 1)
    leased = coordinator.manager.host.used
    coordinator.forward_begin(decode=[slots[0], -1, slots[1]])
    assert coordinator.manager.host.used == leased + 1
    assert Watching.seen == [(slots, leased)] * 2
    coordinator.forward_abort()
    coordinator.close()


def test_an_error_before_pages_are_leased_leaves_no_forward_open():
    coordinator = make(Watching)
    slot = coordinator.request_begin()

    def fails(slots):
        raise RuntimeError("no")

    coordinator.before_lease.append(fails)
    with pytest.raises(RuntimeError, match="no"):
        coordinator.forward_begin(decode=[slot])
    assert coordinator.forward is None
    assert coordinator.manager.host.used == 0
    coordinator.close()


def test_a_stage_may_want_nothing_called():
    coordinator = make(Silent)
    assert Watching.bound
    assert coordinator.before_lease == []
    coordinator.close()


def test_a_refusal_leaves_nothing_allocated():
    with pytest.raises(ConfigError, match="it is a Tuesday"):
        make(Refusing)
    assert Watching.seen == ["closed"]


@pytest.mark.parametrize("stages", [["bound"], ["keep", "bound"]])
def test_a_stage_that_says_so_ends_the_sharing_of_prefixes(stages):
    coordinator = make(Watching, stages=stages)
    assert not coordinator.requests.shares_prefixes
    assert [spec.prefix for spec in coordinator.specs if spec] == ["none"]
    coordinator.close()
    plain = make(Watching, stages=["keep"])
    assert plain.requests.shares_prefixes
    plain.close()
