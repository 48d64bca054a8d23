"""An instance is made by the named factory, and keeps the contract of its kind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from topkv import hookimpl
from topkv.entries import PluginEntry
from topkv.errors import CapabilityError, PluginError
from topkv.hooks import eviction, observer
from topkv.hooks.eviction import EvictionSetup
from topkv.plugins import PluginRegistry
from topkv.plugins.contract import check_instance, spec_functions


class Observer:
    """A correct observer, and the base of wrong ones."""

    def __init__(self, setup=None):
        self.setup = setup

    @hookimpl
    def before_forward(self, report):
        return None

    @hookimpl
    def after_forward(self, report):
        return None


class BrokenObserver:
    def __init__(self, setup):
        raise OSError("no log file")


def refusing(setup):
    raise CapabilityError("watcher cannot serve this", ["it is Sunday"])


def entry(name="watcher", attribute="Observer"):
    return PluginEntry(name, "observer", f"{__name__}:{attribute}")


def right(*entries):
    """Make a registry of one package that offers observers."""
    offer = SimpleNamespace(topkv_register_observers=hookimpl(lambda: entries))
    return PluginRegistry([("right", "2.0", offer)])


def test_create_builds_and_checks():
    found = right(entry())
    setup = object()
    instance = found.create("observer", "watcher", setup)
    assert type(instance).__name__ == "Observer"
    assert instance.setup is setup


def test_create_takes_the_factory_of_the_implementation():
    factories = {"reference": f"{__name__}:Observer", "triton": f"{__name__}:Other"}
    one = PluginEntry("one", "observer", {"triton": f"{__name__}:Other"})
    found = right(PluginEntry("both", "observer", factories), one)
    assert type(found.create("observer", "both", None)).__name__ == "Observer"
    assert type(found.create("observer", "both", None, "triton")).__name__ == "Other"
    with pytest.raises(PluginError, match="it offers triton, got reference; set impl") as caught:
        found.create("observer", "one", None)
    assert "right 2.0 (observer 'one') has no such implementation" in str(caught.value)


def test_create_names_whose_factory_failed():
    absent = PluginEntry("absent", "observer", "topkv_is_not_there:Watcher")
    attribute = entry("attribute", attribute="Nothing")
    entries = (absent, attribute, entry("broken", attribute="BrokenObserver"))
    found = right(*entries, entry("refuses", attribute="refusing"))
    expected = {
        "absent": "topkv_is_not_there:Watcher: ModuleNotFoundError",
        "attribute": "AttributeError",
        "broken": "OSError: no log file",
    }
    for name, text in expected.items():
        with pytest.raises(PluginError, match=text) as caught:
            found.create("observer", name, None)
        assert f"right 2.0 (observer '{name}')" in str(caught.value)
        assert caught.value.__cause__ is not None
    with pytest.raises(CapabilityError, match="it is Sunday") as refused:
        found.create("observer", "refuses", None)
    assert "right 2.0" in refused.value.__notes__[0]


class Wrong:
    @hookimpl(tryfirst=True)
    def before_forward(self, report):
        return None

    def after_forward(self, report):
        return None

    @hookimpl
    def retrieve(self):
        return None

    @property
    def costly(self):
        raise RuntimeError("a property was evaluated")


class Other(Observer):
    """Another correct observer."""


class Older(Observer):
    @hookimpl
    def before_forward(self, slots, prefill_tokens):
        return None

    @hookimpl
    def after_forward(self, *, report):
        return None


class Wrapped(Observer):
    @hookimpl(wrapper=True)
    def before_forward(self, report):
        return (yield)


class Short(Observer):
    @hookimpl
    def before_forward(self):
        return None


def test_every_breach_of_the_contract_is_reported_at_once():
    with pytest.raises(PluginError, match="mine 1 does not keep") as caught:
        check_instance(Wrong(), observer, "mine 1")
    reasons = " ".join(caught.value.reasons)
    assert len(caught.value.reasons) == 3
    assert "before_forward is called as a plain method and cannot be tryfirst" in reasons
    assert "after_forward of topkv.hooks.observer is not marked with @hookimpl" in reasons
    assert "retrieve is marked with @hookimpl and topkv.hooks.observer has no such hook" in reasons


@pytest.mark.parametrize(
    ("instance", "text"),
    [
        (Older(), r"before_forward must take \(report\), got \(slots, prefill_tokens"),
        (Older(), r"after_forward must take .* got \(\*, report\)"),
        (Wrapped(), "cannot be wrapper"),
        (Short(), r"got \(\)"),
        (object(), "before_forward of topkv.hooks.observer is missing"),
    ],
)
def test_a_breach_of_the_contract_is_refused(instance, text):
    with pytest.raises(PluginError, match=text):
        check_instance(instance, observer, "mine 1")


def test_options_and_arguments_are_reported_at_once():
    class Both(Observer):
        @hookimpl(trylast=True)
        def before_forward(self):
            return None

    with pytest.raises(PluginError) as caught:
        check_instance(Both(), observer, "mine 1")
    assert len(caught.value.reasons) == 2


def test_the_cores_own_plugins_keep_their_contract():
    policy = PluginRegistry([]).create("eviction", "lru", EvictionSetup(torch.device("cpu")))
    check_instance(policy, eviction, "topkv")
    assert list(spec_functions(eviction)) == ["new_position", "new_state"]


def test_a_static_method_and_an_attribute_are_found():
    class Bare:
        @staticmethod
        @hookimpl
        def before_forward(report):
            return None

    bare = Bare()
    bare.after_forward = hookimpl(lambda report: None)
    check_instance(bare, observer, "bare 1")
