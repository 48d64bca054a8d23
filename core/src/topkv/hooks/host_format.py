"""Hook specs of a host format: the form of the entries of a group in host memory.

``factory(setup)`` gives one for each sparse group when a configuration is lowered, with a
``HostFormatSetup``; it allocates nothing. The setting ``host_format`` names it.

The core rounds each token once, when it is appended or its chunk arrives, and the token has this
value on both tiers from then on. So what was rounded is encoded without loss: it comes back to
the bit, from torch and from kernels alike. Bytes that are all 0xFF decode to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from attrs import frozen
from torch import Tensor

from topkv.plugins.discovery import hookspec, optional
from topkv.types import GroupShape, ModelShape


@frozen
class HostFormatSetup:
    """The argument of the factory of a host format.

    Attributes:
        model: geometry of the attention layers.
        group: shapes of the group, its entries as they are on the device.
    """

    model: ModelShape
    group: GroupShape


@frozen
class EntryKernels:
    """Device functions of Triton by which kernels read and write rows of entries in host memory.

    ``p_entry + at`` points to the first of BLOCK elements in a row of D, ``[n]``; ``live`` says
    which of them are meant, ``mask`` which elements ``[n, BLOCK]``, of which ``d`` are the
    numbers. An entry has SIZE elements, and ``p_entry`` points to bytes where it is coded.

    Attributes:
        read: ``(p_entry, at, d, live, mask, SIZE, D)`` gives whatever ``decode`` takes.
        decode: ``(data, at, d, DTYPE, D)`` gives elements of DTYPE.
        write: ``(p_entry, at, d, x, live, mask, SIZE, D)`` writes whole rows of ``x``, which is 0
            where it is masked out.
        rows: most rows that a program writes back at once, a power of two.
        warps: of a program that fetches history.
    """

    read: Any
    decode: Any
    write: Any
    rows: int
    warps: int


class HostFormat(Protocol):
    """The form of a group's entries in host memory, seen as rows of D elements."""

    @hookspec
    def coded_bytes(self) -> int:
        """Return the bytes of a coded entry, a multiple of 16; 0 where it is as on the device."""

    @hookspec
    def round(
        self, k: Tensor, v: Tensor, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Round keys and values to what the format holds, which is all that anybody sees. Hot.

        Args:
            k, v: ``[n, Hkv, D]`` in the model's dtype, last dimension contiguous.
            out: two of ``[n, Hkv, D]``, contiguous, to write to; made if None.

        Returns:
            ``k`` and ``v`` themselves where entries are as on the device.
        """

    @hookspec
    def parts(self, entries: Tensor) -> Sequence[Tensor]:
        """Return views ``[..., heads_per_lane, planes, unit, n]`` of entries of
        ``GroupStore.entries``, one for each part of a row."""

    @hookspec
    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the parts ``[..., n]`` of rows ``[..., D]``, which are rounded."""

    @hookspec
    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows ``[..., D]`` of parts."""

    @optional
    @hookspec
    def kernels(self) -> EntryKernels:
        """Return the device functions, where the implementation is ``"triton"``."""
