"""The host format ``model``: entries in host memory are as on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from topkv.hooks.host_format import EntryKernels, HostFormatSetup
from topkv.plugins.discovery import hookimpl


class Plain:
    """Entries as the device has them; one part."""

    @hookimpl
    def coded_bytes(self) -> int:
        return 0

    @hookimpl
    def round(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        return k, v

    @hookimpl
    def parts(self, entries: Tensor) -> Sequence[Tensor]:
        return (entries,)

    @hookimpl
    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        return (rows,)

    @hookimpl
    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    @hookimpl
    def kernels(self) -> EntryKernels:
        from topkv.kv.entry_kernels import PLAIN_KERNELS

        return PLAIN_KERNELS


PLAIN = Plain()


def plain(setup: HostFormatSetup) -> Plain:
    """Return the plain format, one for all groups."""
    return PLAIN
