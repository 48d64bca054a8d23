"""Lowering with the entries of one package, for the tests of configurations."""

from __future__ import annotations

import pytest
import torch
from attrs import field, frozen
from attrs.validators import ge

from topkv import hookimpl
from topkv.config import SparseConfig, lower
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape

MODEL = ModelShape(8, 8, 2, 64, torch.bfloat16, 0.125)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDE = Capabilities(units=(1, 128), host_memory=True)


def _entry(name, kind, factories="x:Y", **values):
    return PluginEntry(name, kind, factories, **values)


class Entries:
    """Entries of one package; nothing here imports their factories."""

    def __init__(self, algorithms=(), backends=(), observers=()):
        self.algorithms = [_entry(name, "algorithm", **v) for name, v in algorithms]
        self.backends = [_entry(name, "backend", **v) for name, v in backends]
        self.observers = [_entry(name, "observer", **v) for name, v in observers]

    @hookimpl
    def topkv_register_algorithms(self):
        return self.algorithms

    @hookimpl
    def topkv_register_backends(self):
        return self.backends

    @hookimpl
    def topkv_register_observers(self):
        return self.observers


@frozen
class PagesParams:
    """Parameters of ``PAGES``."""

    sinks: int = field(default=1, validator=ge(0))
    bits: int = 8
    share: float = 0.5
    file: str | None = None
    steps: tuple[int, ...] = ()
    whole: bool = False

    def __attrs_post_init__(self):
        if self.sinks > self.bits:
            raise ValueError(f"sinks must be at most bits, got {self.sinks} and {self.bits}")


PAGES = (
    "pages",
    {"defaults": {"dense_layers": (0, 1, 99)}, "parameters": PagesParams},
)
TOKENS = ("tokens", {"defaults": {"unit": 1, "scope": "shared"}})
ANY = ("any", {"capabilities": WIDE})


def make(algorithms=(PAGES,), backends=(ANY,), observers=()):
    return PluginRegistry([("topkv-fake", "0.3", Entries(algorithms, backends, observers))])


def low(
    config=None, model=MODEL, device=CPU, registry=None, checkpoint=None, positions=None, **more
):
    config = config or SparseConfig(**more)
    registry = registry or make()
    return lower(
        *(config, model),
        device=device,
        registry=registry,
        checkpoint=checkpoint,
        max_positions=positions,
    )


def refused(*args, **options):
    with pytest.raises(ConfigError) as caught:
        low(*args, **options)
    return list(caught.value.reasons)


def reason(*args, **options):
    (only,) = refused(*args, **options)
    return only


def origin(lowered, name):
    (setting,) = (setting for setting in lowered.settings if setting.name == name)
    return setting.value, setting.origin
