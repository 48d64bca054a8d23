"""Host formats in a configuration: who may have them, and what a factory may say."""

from __future__ import annotations

import pytest
import torch

from topkv.config import SparseConfig, lower
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError
from topkv.kv.host_format import PLAIN, Plain, plain
from topkv.plugins import PluginRegistry
from topkv.plugins.discovery import hookimpl
from topkv_testing.machines.lifecycle_model import MODEL
from topkv_testing.models.doubles import Entries


class Odd(Plain):
    """Entries of 24 bytes, which no word of 16 divides."""

    def __init__(self, setup):
        self.group = setup.group

    @hookimpl
    def coded_bytes(self):
        return 24


class Refusing(Plain):
    """Takes no model."""

    def __init__(self, setup):
        raise ConfigError("refused", [f"unit {setup.group.unit}", f"H {setup.model.num_heads}"])


def entry(factory, name="mine", **capabilities):
    place = f"{__name__}:{factory.__name__}"
    return PluginEntry(name, "host_format", place, capabilities=Capabilities(**capabilities))


def lowered(*further, **settings):
    registry = PluginRegistry([("topkv-doubles", "1", Entries(*further))])
    options = {"algorithm": "scripted", "backend": "gather", "host_format": "mine", **settings}
    return lower(SparseConfig(**options), MODEL, device=torch.device("cpu"), registry=registry)


def refusal(*further, **settings):
    with pytest.raises(ConfigError) as caught:
        lowered(*further, **settings)
    return str(caught.value)


def test_without_a_setting_entries_are_as_on_the_device():
    config = lowered(host_format="model")
    assert [group.host for group in config.groups] == [PLAIN] * len(config.groups)
    assert all(group.shape.host_entry_bytes == group.shape.entry_bytes for group in config.groups)


def test_an_engine_gets_no_other_form_than_it_states():
    engine = PluginEntry("old", "transfer", "topkv.transfer.reference:ReferenceTransfer")
    mine = entry(plain)
    reported = refusal(mine, engine, transfer="old")
    assert "(transfer 'old') takes host_format model, got mine (layers 0-3, sparse)" in reported
    dense = lowered(mine, engine, transfer="old", layers={"0-": "streamed"})
    assert [group.host for group in dense.groups] == [PLAIN]
    lowered(mine, engine)


def test_a_format_is_refused_with_every_reason():
    reported = refusal(entry(Refusing, attention=("mla",)), page_tokens=8)
    for reason in (
        "topkv-doubles 1 (host_format 'mine'): unit 16",
        "topkv-doubles 1 (host_format 'mine'): H 4",
        "(host_format 'mine') takes attention mla, got gqa",
        "unit must divide page_tokens",
    ):
        assert reason in reported
    assert "coded_bytes must be a multiple of 16, got 24" in refusal(entry(Odd))
    assert "unknown host_format 'mine'" in refusal()


def test_a_format_has_an_entry_for_the_implementation():
    triton = PluginEntry("mine", "host_format", {"triton": "nowhere:Nothing"})
    reported = refusal(triton)
    assert "(host_format 'mine') takes impl triton, got reference" in reported
