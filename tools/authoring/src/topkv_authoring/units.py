"""Units by kernels: an author writes device functions, and everything else is here.

    class Mean(ScoredUnits):  # in torch: representations, represent, score
        ...

    class MeanKernels(UnitKernels, Mean):
        represent_unit, score_tile = mean_of, product  # functions of triton.jit

``topkv_authoring.unit_kernels`` has the arguments of both. Everything else is launches, scratch,
page look-up, the ring, masks, and the ranking of scores. ``KeptByKernels`` alone is for stages,
and for algorithms that score in kernels of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.hooks.stage import StageSetup
from topkv.plugins.discovery import hookimpl
from topkv.types import GroupShape, LayerView, ModelShape
from topkv_authoring.contract import broken_contract
from topkv_authoring.lane_scores import HeadScores
from topkv_authoring.selectors import KeepsUnits, RankedUnits, ScoredUnits, touched

NARROW_G, NARROW_D = 64, 256
"""Query heads of a kv-head, and channels, whose queries a program keeps in registers."""

NARROW: dict[str, int] = {"TILE_U": 32, "TILES": 4, "STAGES": 3, "num_warps": 1}
"""Units of a tile, tiles of a program, loads in flight, warps. With bounds of 512 bytes a unit
they read 88 % of what an H200 reads at best."""

WIDE: dict[str, int] = {"TILE_U": 64, "TILES": 2, "STAGES": 3, "num_warps": 8}
"""Launch constants for more heads or channels; ``WIDE_D`` channels are taken at a time."""

WIDE_D = 64


@frozen
class BoundLayer:
    """Views of a layer's memory as kernels take it, made once: its addresses are fixed.

    Attributes:
        layer_pools, ring: the mapping and the tensor of the layer that the views are of.
        pools: as device functions write them, in the order of ``representations``.
        keys, values: the rings, bfloat16 as its bits.
        strides: of both rings, ``[max_requests, lane_heads, T, heads_per_lane, unit]``.
    """

    layer_pools: Mapping[str, Tensor]
    ring: Tensor
    pools: tuple[Tensor, ...]
    keys: Tensor
    values: Tensor
    strides: tuple[int, ...]


class KeptByKernels(KeepsUnits):
    """Mix-in before a ``KeepsUnits``: kernels write representations of units. Needs Triton.

    Attributes:
        represent_unit: device function, see ``topkv_authoring.unit_kernels``.
        options: constants for device functions, numbers in a tuple; ``()`` here.
        unit_parts: equal parts of a unit, each of which is represented by itself; 1 here.
    """

    represent_unit: ClassVar[Any]
    unit_parts: int = 1

    def __init__(self, setup: AlgorithmSetup | StageSetup) -> None:
        super().__init__(setup)  # type: ignore[call-arg]  # of the class behind it
        import triton

        from topkv_authoring import unit_kernels

        self.kernels, group = unit_kernels, self.group
        self.names = [spec.name for spec in self.representations()]
        self.as_bits = self.model.dtype is torch.bfloat16
        self._bound: dict[int, BoundLayer] = {}
        self.geometry = {
            "KV_HEADS": group.num_kv_heads,
            "UNIT": group.unit,
            "UNITS_PER_PAGE": group.units_per_page,
            "OPTIONS": self.options,
            "D": group.head_dim,
        }
        self.writing = self.geometry | {
            "REPRESENT": type(self).represent_unit,
            "PARTS": self.unit_parts,
            "VALUES": self.keeps_values,
            "AS_BITS": self.as_bits,
            "BLOCK_T": max(2, triton.next_power_of_2(group.unit // self.unit_parts)),
            "BLOCK_D": max(16, triton.next_power_of_2(group.head_dim)),
            "num_warps": 4 if group.head_dim <= NARROW_D else 8,
        }

    @property
    def options(self) -> tuple[int, ...]:
        return ()

    def _bits(self, rows: Tensor) -> Tensor:
        return rows.view(torch.int16) if rows.dtype is torch.bfloat16 else rows

    def _rows(self, rows: Tensor) -> Tensor:
        """Keys or values as kernels read them: bfloat16 as its bits."""
        return self._bits(rows if rows.stride(-1) == 1 else rows.contiguous())

    def bound(self, layer: LayerView) -> BoundLayer:
        """Views of a layer's memory. A view costs the host a microsecond or two, at each step."""
        known = self._bound.get(layer.index)
        if known is None or known.layer_pools is not layer.pools or known.ring is not layer.ring_k:
            pools = tuple(self._bits(layer.pools[name]) for name in self.names)
            keys, values = self._bits(layer.ring_k), self._bits(layer.ring_v)
            strides = layer.ring_k.stride()[:5]
            known = BoundLayer(layer.pools, layer.ring_k, pools, keys, values, strides)
            self._bound[layer.index] = known
        return known

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        if k.shape[0] == 0:
            return
        group, keys = self.group, self._rows(k)
        values = self._rows(v) if self.keeps_values else keys
        units = -(-k.shape[0] // group.unit)
        self.kernels.construct_kernel[(units, group.num_kv_heads, self.unit_parts)](
            *(keys, values, self.bound(layer).pools, layer.step.page_table[slot]),
            *(start // group.unit, k.shape[0], *keys.stride()[:2], *values.stride()[:2]),
            **self.writing,
        )

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        group, step, bound = self.group, layer.step, self.bound(layer)
        keys, values, strides = bound.keys, bound.values, bound.strides
        if group.unit == 1:  # there is no ring where a stage regrains
            keys, values = self._bits(k), self._bits(v)
            strides = (k.stride(0), 0, k.stride(1), k.stride(2), 0)
        units = touched(group.unit, k.shape[1])
        self.kernels.update_kernel[(step.batch * units, group.num_kv_heads, self.unit_parts)](
            *(keys, values, bound.pools, step.slots, step.lengths, step.appended),
            *(step.page_table, step.page_table.stride(0), *strides),
            HEADS_PER_LANE=group.heads_per_lane,
            T=group.ring_slots,
            TOUCHED=units,
            **self.writing,
        )


class KeptOfTokens:
    """Mix-in: kernels write representations of single tokens. Needs Triton.

    The class behind it has ``model`` and ``group``, whose units may be of any size.

    Attributes:
        represent_tokens: device function, see ``topkv_authoring.token_kernels``.
        options: constants for it, numbers in a tuple.
        rows: tokens of a program, of a prompt and of a step.
        writing: keywords of the launches, ``num_warps`` say.
    """

    model: ModelShape
    group: GroupShape
    represent_tokens: ClassVar[Any]
    rows: tuple[int, int] = (16, 16)
    writing: Mapping[str, Any] = {"num_warps": 4}

    @property
    def options(self) -> tuple[int, ...]:
        return ()

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads and elements of the keys of a token."""
        return self.group.num_kv_heads, self.group.head_dim

    @abstractmethod
    def written(self, layer: LayerView) -> tuple[Tensor, ...]:
        """The tensors that the device function gets, bfloat16 ones as int16."""

    def keys(self, k: Tensor) -> Tensor:
        """Keys ``[..., Hkv, D]`` as the device function reads them; here as they are."""
        return k if k.stride(-1) == 1 else k.contiguous()

    def construct_tokens(self, layer: LayerView, slot: int, start: int, k: Tensor) -> None:
        """Represent keys ``[m, Hkv, D]`` of a request from position ``start``."""
        if k.shape[0] == 0:
            return
        from topkv_authoring.token_kernels import construct_tokens_kernel

        keys = self.keys(k)
        construct_tokens_kernel[(-(-k.shape[0] // self.rows[0]), k.shape[1])](
            *(keys, self.written(layer), layer.step.page_table[slot], slot, start, k.shape[0]),
            *(keys.stride(0), keys.stride(1)),
            ROWS=self.rows[0],
            **self._sizes(),
        )

    def update_tokens(self, layer: LayerView, k: Tensor) -> None:
        """Represent the keys ``[B, Q, Hkv, D]`` of the tokens that rows appended. Hot."""
        from topkv_authoring.token_kernels import update_tokens_kernel

        step, keys, queries = layer.step, self.keys(k), k.shape[1]
        count = step.batch * queries
        update_tokens_kernel[(-(-count // self.rows[1]), k.shape[2])](
            *(keys, self.written(layer), step.slots, step.lengths, step.appended),
            *(step.page_table, count, step.page_table.stride(0), *keys.stride()[:3]),
            QUERIES=queries,
            ROWS=self.rows[1],
            **self._sizes(),
        )

    def _sizes(self) -> dict[str, Any]:
        heads, dim = self.key_shape
        return {
            "KV_HEADS": heads,
            "PAGE": self.group.page_tokens,
            "REPRESENT": type(self).represent_tokens,
            "OPTIONS": self.options,
            "D": dim,
            **self.writing,
        }

    @hookimpl
    def construct(
        self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor, q: Tensor, lse: Tensor
    ) -> None:
        self.construct_tokens(layer, slot, start, k)

    @hookimpl
    def update(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        self.update_tokens(layer, k)


class UnitKernels(KeptByKernels, ScoredUnits):
    """Mix-in before a ``ScoredUnits``: units are scored by kernels too.

    Scores of the heads of a lane become its scores as ``RankedUnits.combine`` does it.

    Attributes:
        prepare_query, score_tile, finish_tile: device functions, see
            ``topkv_authoring.unit_kernels``; the first and the last may be left out.
    """

    impl = "triton"
    prepare_query: ClassVar[Any] = None
    score_tile: ClassVar[Any]
    finish_tile: ClassVar[Any] = None

    def __init__(self, setup: AlgorithmSetup) -> None:
        """Raise ConfigError as the reference does, and for queries that are too large to prepare.

        Raises:
            PluginError: the class has a ``combine`` of its own, which kernels would not call.
        """
        super().__init__(setup)
        import triton

        model, group, cls = self.model, self.group, type(self)
        if cls.combine is not RankedUnits.combine and cls.lane_scores is UnitKernels.lane_scores:
            raise broken_contract(
                cls,
                "units",
                "UnitKernels ranks by the combine of RankedUnits, got a class with a combine of "
                "its own; leave it out, or override lane_scores with kernels that do it",
            )
        most = model.group_size * setup.max_queries
        wide = group.head_dim > NARROW_D or most > NARROW_G
        if wide and cls.prepare_query is not None:
            raise ConfigError(
                cls.__name__,
                [
                    f"prepare_query needs a query at once, up to {NARROW_D} channels and "
                    f"{NARROW_G} query heads of a kv-head, got {group.head_dim} and {most}; "
                    "choose impl 'reference', or another algorithm"
                ],
            )
        sizes = WIDE if wide else NARROW
        block = sizes["TILE_U"] * sizes["TILES"]
        self.heads = HeadScores(model, group, block, setup.device, setup.max_queries)
        self.scoring: list[dict[str, Any]] = []
        for queries in range(1, setup.max_queries + 1):
            each = model.group_size * queries
            constants: dict[str, Any] = {
                "PREPARE": cls.prepare_query,
                "SCORE": cls.score_tile,
                "FINISH": cls.finish_tile or self.kernels.kept,
                "GROUP": each,
                "QUERIES": queries,
                "BLOCK_G": min(NARROW_G, max(16, triton.next_power_of_2(each))),
                "BLOCK_D": WIDE_D if wide else self.writing["BLOCK_D"],
                "FP32": model.dtype is torch.float32 or setup.device.type == "cpu",
            }
            self.scoring.append(self.geometry | sizes | constants)

    def lane_scores(self, layer: LayerView, q: Tensor) -> tuple[Tensor, Tensor]:
        group, step, heads = self.group, layer.step, self.heads
        queries = q.shape[1] // self.model.num_heads
        constants = self.scoring[queries - 1]
        parts = -(-constants["GROUP"] // constants["BLOCK_G"])
        programs = step.batch * group.num_kv_heads * parts
        self.kernels.score_kernel[(programs, heads.blocks)](
            *(q, tuple(layer.pools[name] for name in self.names)),
            *(step.slots, step.lengths, step.appended, step.page_table),
            *(heads.raw, heads.peak, heads.mass),
            *(step.page_table.stride(0), group.max_units, heads.blocks, self.model.scale),
            *(q.stride(0), q.stride(1)),
            **constants,
        )
        return heads.lanes(step, self.sink_units, self.recent_units, queries)
