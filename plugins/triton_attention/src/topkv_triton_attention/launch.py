"""Launches of the kernels: their constants, the number of splits, and the scratch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
from attrs import evolve, frozen
from torch import Tensor

from topkv.types import Tables
from topkv_triton_attention.decode_kernels import attend_kernel, merge_kernel
from topkv_triton_attention.reference import check_decode

INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)
"""True if the kernels run in Triton's interpreter, on CPU tensors."""

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 128
"""Tokens of the shortest split: a shorter one costs more in the merge than it gains."""
MAX_WAVES = 4
"""Most programs that splitting makes, as a multiple of those that run at once."""
_INTERPRETED_PROCESSORS = 8
"""Multiprocessors that the interpreter counts as: few, but enough for short calls to be split."""


@frozen
class DecodeLaunch:
    """Launch constants of ``attend_kernel``.

    Attributes:
        block: tokens per iteration.
        num_warps, num_stages: of the launch.
        resident: programs that one multiprocessor runs at once.
    """

    block: int
    num_warps: int
    num_stages: int
    resident: int


# By padded head dim, and by whether consecutive tokens of a block are in one run (unit > 1).
_DECODE = {
    (64, False): DecodeLaunch(64, 4, 3, 4),
    (64, True): DecodeLaunch(64, 4, 3, 4),
    (128, False): DecodeLaunch(64, 4, 2, 4),
    (128, True): DecodeLaunch(64, 4, 2, 4),
    (256, False): DecodeLaunch(32, 4, 3, 2),
    (256, True): DecodeLaunch(32, 4, 3, 2),
}


def decode_launch(dim: int, unit: int, itemsize: int) -> DecodeLaunch:
    """Launch constants for a head dim, a unit and a dtype."""
    launch = _DECODE[power(dim), unit > 1]
    if itemsize == 4:
        # Exact fp32 products run outside the tensor cores: a small block stays in registers.
        return evolve(launch, block=16)
    return launch


@cache
def split_count(
    programs: int,
    tokens: int,
    slots: int,
    block: int,
    least: int = MIN_SPLIT_TOKENS,
    waves: int = MAX_WAVES,
) -> int:
    """Number of splits of each lane's tokens; from shapes alone, so that a graph can hold it.

    The fewest that keep the multiprocessors about as busy as any other number would.

    Args:
        programs: programs without a split.
        tokens: most tokens of a lane.
        slots: programs that the device runs at once.
        block: tokens per iteration.
        least: tokens of the shortest split.
        waves: most programs, as a multiple of ``slots``, that splitting may make.
    """
    blocks = max(1, -(-tokens // block))
    most = min(MAX_SPLITS, -(-tokens // least), waves * slots // programs)
    busy = {}
    for splits in range(1, max(1, most) + 1):
        if -(-blocks // -(-blocks // splits)) == splits:  # else some of them would be empty
            filled = programs * splits / slots
            busy[splits] = filled / math.ceil(filled)
    return next(splits for splits, value in busy.items() if value >= 0.85 * max(busy.values()))


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a device; under the interpreter a small number."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _INTERPRETED_PROCESSORS


class Decoder:
    """``attend`` of the hook specs.

    Args:
        max_batch: most rows of one call.
        heads: query heads of a row.
        group: query heads of a kv-head.
        dim: head dim.
        scale: factor of the logits.
        device: where q lives.
        launch: launch constants; None takes those of the table above.
        splits: splits of every call; None chooses them from the shapes.
        softcap: of the logits, see ``topkv.types.ModelShape``.
        max_queries: most queries of a row.

    Attributes:
        further: arguments of ``attend_kernel`` beyond those of every call.
    """

    further: Mapping[str, Any] = {}

    def __init__(
        self,
        max_batch: int,
        heads: int,
        group: int,
        dim: int,
        scale: float,
        device: torch.device,
        launch: DecodeLaunch | None = None,
        splits: int | None = None,
        softcap: float | None = None,
        max_queries: int = 1,
    ) -> None:
        self.max_batch, self.max_queries = max_batch, max_queries
        self.scale_log2, self.cap_log2 = factors(scale, softcap)
        self.launch = launch
        self.splits = splits
        self.processors = processors_of(device)
        if splits is None:
            # split_count makes at most this many programs when it splits at all.
            resident = max(each.resident for each in (launch, *_DECODE.values()) if each)
            programs = MAX_WAVES * self.processors * resident
            rows = min(programs * group, max_batch * heads * MAX_SPLITS) * max_queries
        else:
            rows = max_batch * max_queries * heads * splits
        self.part = torch.empty(rows * dim, dtype=torch.float32, device=device)
        self.part_lse = torch.empty(rows, dtype=torch.float32, device=device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.Backend.attend``. Allocates nothing."""
        check_decode(q, k, v, self.max_batch, self.max_queries)
        rows, queries, heads, dim = q.shape
        if not rows:
            return
        table, lengths = tables.table, tables.lengths
        lanes, kv_heads, unit = len(table), k.shape[1], k.shape[2]
        group = heads * rows // (lanes * kv_heads)
        launch = self.launch or decode_launch(dim, unit, q.element_size())
        splits = self.splits or split_count(
            lanes * kv_heads,
            table.shape[1] * unit,
            self.processors * launch.resident,
            launch.block,
        )
        # Strides by row, head and split of what attend_kernel writes.
        if splits == 1:
            results = out, lse
            strides = (out.stride(0), out.stride(2), 0, lse.stride(0), lse.stride(2), 0)
        else:
            results = self.part, self.part_lse
            each, parts = queries * heads * splits, heads * splits
            strides = (each * dim, splits * dim, dim, each, splits, 1)
        several: dict[str, Any] = {}
        merging: dict[str, Any] = {}
        if queries > 1:
            merging = {"QUERIES": queries, "stride_oq": out.stride(1), "stride_lq": lse.stride(1)}
            to = (out.stride(1), lse.stride(1)) if splits == 1 else (parts * dim, parts)
            names = ("QUERIES", "queries_ptr", "stride_qq", "stride_oq", "stride_lq")
            values = (queries, tables.queries, q.stride(1), *to)
            several = dict(zip(names, values, strict=True))
        attend_kernel[(lanes * kv_heads, splits)](
            q, k, v, table, lengths, *results, self.scale_log2,
            q.stride(0), q.stride(2), *k.stride()[:3], *v.stride()[:3],
            *table.stride(), lengths.stride(0), *strides,
            LANES=lanes // rows, KV_HEADS=kv_heads, GROUP=group, UNIT=unit, DIM=dim,
            BLOCK_G=max(16, power(group * queries)), BLOCK_D=power(dim),
            BLOCK_N=launch.block, UPCAST=upcast(q), CAP=self.cap_log2,
            num_warps=launch.num_warps, num_stages=launch.num_stages, **several, **self.further,
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(rows * queries * heads,)](
                self.part, self.part_lse, out, lse, splits,
                out.stride(0), out.stride(2), lse.stride(0), lse.stride(2),
                HEADS=heads, DIM=dim, BLOCK_D=power(dim),
                BLOCK_S=power(splits), num_warps=4, **merging,
            )  # fmt: skip


class SkippingDecoder(Decoder):
    """``attend`` that leaves out blocks of keys which matter little, see ``skip_reference``.

    Args:
        factor: of the option ``skip_softmax``.
        sizes, options: as of ``Decoder``.

    Attributes:
        skipped: int32 ``[N * kv-heads of a lane, splits]`` into which each call writes how many
            blocks it left out; None, as it is but in tests, counts nothing.
    """

    skipped: Tensor | None = None

    def __init__(self, *sizes: Any, factor: float, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.factor_log2 = math.log2(factor)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """See ``Decoder.attend``; ``tables.attached`` has the lengths of the rows' requests.
        Where there are none, nothing is left out."""
        self.further = {} if tables.attached is None else {
            "contexts_ptr": tables.attached, "factor_log2": self.factor_log2, "SKIP": True,
            "skipped_ptr": self.skipped, "COUNT": self.skipped is not None,
        }  # fmt: skip
        super().attend(q, k, v, tables, out, lse)


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Arguments of kernels for the scale, and for CAP: softmax is computed by powers of two."""
    log2e = math.log2(math.e)
    return (scale * log2e, 0.0) if softcap is None else (scale / softcap, softcap * log2e)


def upcast(q: Tensor) -> bool:
    """Return True where fp32 is needed: Triton's interpreter multiplies bfloat16's bits."""
    return INTERPRETED and q.dtype == torch.bfloat16


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
