"""Host formats that the kit runs transfer engines with: the plain one, and one that codes."""

from __future__ import annotations

from attrs import evolve

from topkv.entries import PluginEntry
from topkv.hooks.host_format import HostFormat, HostFormatSetup
from topkv.kv.host_format import PLAIN
from topkv.plugins import PluginRegistry
from topkv.types import GroupShape, ModelShape
from topkv_fp8_host_format import entry as fp8

CODED = "fp8"


def formats_of(entry: PluginEntry) -> list[str]:
    """Return the names of those in which a transfer engine keeps entries."""
    stated = entry.capabilities.host_formats
    return [name for name in ("model", CODED) if stated is None or name in stated]


def coding(group: GroupShape, impl: str = "reference") -> HostFormat:
    """Make the format that codes, for a group of any shape."""
    heads = group.num_kv_heads
    model = ModelShape(len(group.layers), heads, heads, group.head_dim, group.dtype, 1.0)
    setup = HostFormatSetup(model, evolve(group, coded_bytes=0))
    registry = PluginRegistry([("topkv-fp8-host-format", "0", fp8)])
    made: HostFormat = registry.create("host_format", CODED, setup, impl)
    return made


def host_of(group: GroupShape, impl: str = "reference") -> HostFormat:
    """Return the format of a group's entries in the host pool."""
    return coding(group, impl) if group.coded_bytes else PLAIN
