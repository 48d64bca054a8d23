"""Launches of the indexer's kernels, their scratch, and the algorithm that uses them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.ops import pdl
from topkv.ops.topk import topk
from topkv.types import GroupShape, LayerView, ModelShape, Selection
from topkv_authoring.index import PROMPT_ROWS
from topkv_authoring.sticky import prefer_resident
from topkv_authoring.units import KeptOfTokens
from topkv_deepseek_dsa import kernels, key_kernels
from topkv_deepseek_dsa.algorithm import DeepSeekDSA
from topkv_deepseek_dsa.entry import IndexerParams

SCORING = {"fp8": (64, 6, 4), "bf16": (64, 5, 4), "fp32": (16, 3, 4)}
"""The score kernel, by what is multiplied, ``"bf16"`` for all of 16 bits: tokens of a tile,
stages, warps. The look-up of the page is a stage of its own: 6 stages keep three tiles of keys in
flight, 5 keep two, which hold twice as much in 16 bits. Products of fp32 are made without tensor
cores, and larger tiles do not fit registers."""

COLUMNS = {"fp8": 256, "bf16": 256, "fp32": 0}
"""Most columns of a product, where rows have several queries: heads of as many queries as they are
for, and of one at least. More of them come one after the other, and read the keys again."""

WIDE_COLUMNS = 128
"""Columns from which on a program has twice as many warps, which share its registers."""

RUNNING = {"fp8": 6, "bf16": 3, "fp32": 2}
"""Programs of the score kernel that run at a time on a multiprocessor, which its shared memory
decides: on Hopper, with keys of 128 elements. Where it is another number, steps take longer."""

TILES, WAVES = 44, 8
"""``TILES``: a step has as many programs as run at a time, and as many again for every ``TILES``
tiles that each would have; ``WAVES``: at most this many times as many."""

ROW_PROGRAMS = 8
"""Programs that there are for each row of a step at least: a row gets a whole number of them."""

PROMPT_TILES = 11
"""Most tiles of a program where the rows are those of a prompt."""

EARLY = True
"""True if kernels start early behind the one before, where the device can do that."""

AHEAD = 2
"""Tiles of keys that a program asks for while it waits for the queries; a power of two, or 0."""

QUERY_HEADS = 16
"""Query heads of a program."""

E4M3_PRODUCT, E4M3_DIM = (8, 9), 32
"""First compute capability with a product of e4m3, and the shortest sum that it makes."""

_FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _bits(x: Tensor) -> Tensor:
    """bfloat16 as integers: the kernels make its bits themselves."""
    return x.view(torch.int16) if x.dtype is torch.bfloat16 else x


def waves_of(rows: int, running: int) -> int:
    """Least number of waves for ``rows`` rows; a wave is as many programs as run at a time."""
    return ROW_PROGRAMS * rows // running + 1


def rate_of(running: int) -> float:
    """Waves of programs for each tile of a step; a wave is as many programs as run at a time."""
    return 1 / (TILES * running)


def programs_of(rows: int, tiles: int, running: int) -> int:
    """Programs of the score kernel for ``rows`` rows of at most ``tiles`` tiles each.

    There is one for every block that ``dealing.dealt`` makes, however long the rows are.
    """
    waves = min(rows * tiles // (TILES * running) + 1, WAVES)
    return min(max(waves, waves_of(rows, running)) * running, rows * tiles)


def sizes_of(queries: int, kind: str, block_h: int) -> dict[str, int]:
    """Constants of the score kernel for rows of ``queries`` of ``block_h`` heads each."""
    each = min(max(1, COLUMNS[kind] // block_h), int(triton.next_power_of_2(queries)))
    wide = queries > 1 and each * block_h > WIDE_COLUMNS
    return {"QUERIES": queries, "EACH": each, "num_warps": SCORING[kind][2] * (1 + wide)}


class Launcher:
    """The kernels of one group, with every constant worked out once.

    Attributes:
        query: queries as the score kernel reads them, ``[max_requests * max_queries, H, D]``:
            uint8 codes, or the dtype of the keys.
        weight: their weights, fp32 ``[max_requests * max_queries, H]``.
        scores: fp32 ``[max_requests, max_units]``.
        counts: selectable tokens, int32 ``[max_requests]``.
    """

    def __init__(
        self,
        model: ModelShape,
        group: GroupShape,
        settings: IndexerParams,
        device: torch.device,
        max_queries: int = 1,
    ) -> None:
        self.model, self.group, self.settings = model, group, settings
        assert model.indexer is not None  # the entry needs one
        self.heads, self.dim = model.indexer.num_heads, model.indexer.head_dim
        self.device = device
        self._set_constants(max_queries)
        self.query, self.weight = self._query_scratch(group.max_requests * max_queries)
        self.scores = torch.empty(
            (group.max_requests, group.max_units), dtype=torch.float32, device=device
        )
        self.counts = torch.zeros(group.max_requests, dtype=torch.int32, device=device)

    def _set_constants(self, max_queries: int) -> None:
        settings, dtype = self.settings, self.model.dtype
        fp8 = settings.fp8
        cuda = self.device.type == "cuda"
        own = cuda and dtype is not torch.float32
        native = own and torch.cuda.get_device_capability(self.device) >= E4M3_PRODUCT
        native = native and self.dim >= E4M3_DIM
        # fp32 for fp32 models, and for the interpreter, which has neither product. fp16 holds
        # every e4m3 code.
        factors = tl.float32
        if own:
            factors = _FLOATS[dtype] if not fp8 else tl.float8e4nv if native else tl.float16
        # Tiles of the interpreter may be as large as they like.
        kind = "fp32" if cuda and not own else "fp8" if fp8 and native else "bf16"
        tile, stages, _ = SCORING[kind]
        self.stored = torch.float8_e4m3fn if fp8 and native else torch.uint8 if fp8 else dtype
        formats = {
            "DIM": self.dim,
            "FP8": fp8,
            "HADAMARD": settings.hadamard,
            "LEVELS": self.dim.bit_length() - 1,
            "FACTOR": self.dim**-0.5,
            "POWER_OF_TWO": settings.power_of_two,
            "POOL_BF16": not fp8 and dtype is torch.bfloat16,
            "num_warps": 4,
        }
        self.querying = formats | {"HEADS": self.heads, "BLOCK_H": QUERY_HEADS}
        block_h = max(16, int(triton.next_power_of_2(self.heads)))
        self.scoring = {
            "HEADS": self.heads,
            "BLOCK_H": block_h,
            "DIM": self.dim,
            "PAGE": self.group.page_tokens,
            "TILE": tile,
            "STAGES": stages,
            "FP8": fp8,
            "DECODE": fp8 and not native,
            "FACTORS": factors,
            "CUDA": cuda,
        }
        self.several = [sizes_of(n + 1, kind, block_h) for n in range(max_queries)]
        self.early = EARLY and pdl.available(self.device)
        # Equal for any batch, or each size would be compiled, in the middle of a capture say.
        self.together = int(triton.next_power_of_2(self.group.max_requests))
        # More than one for the interpreter, which would not see rows divided otherwise.
        self.running = 4
        if cuda:
            count = torch.cuda.get_device_properties(self.device).multi_processor_count
            self.running = RUNNING[kind] * count

    def _query_scratch(self, rows: int) -> tuple[Tensor, Tensor]:
        """Uninitialised queries ``[rows, H, D]`` as the score kernel reads them, uint8 where keys
        are fp8 and else of the model's dtype, and weights fp32 ``[rows, H]``.
        """
        settings = self.settings
        dtype = torch.uint8 if settings.fp8 else self.model.dtype
        shape = (rows, self.heads, self.dim)
        query = torch.empty(shape, dtype=dtype, device=self.device)
        return query, torch.empty(shape[:2], dtype=torch.float32, device=self.device)

    def pool(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        """The pool, flat, and the same read as fp32 for the scales of fp8 keys."""
        pool = layer.pools["index"].view(-1)
        return pool, pool.view(torch.float32) if self.settings.fp8 else pool

    def score(self, layer: LayerView, q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``[B, U]`` and selectable tokens ``[B]`` of rows of queries ``[B * Q, H, D]``."""
        step = layer.step
        if not step.batch:
            return self.scores[:0], self.counts[:0]
        scores, counts = self.scores[: step.batch], self.counts[: step.batch]
        self._score(
            *(layer, q, weights, step.slots, step.lengths),
            *(self.query, self.weight, scores, counts),
        )
        return scores, counts

    def prompt(
        self, layer: LayerView, slot: int, tokens: int, counts: Tensor, q: Tensor, weights: Tensor
    ) -> Tensor:
        """Scores ``[m, tokens]`` of rows of one request that see ``counts [m]`` tokens each."""
        rows = q.shape[0]
        scores = torch.empty((rows, tokens), dtype=torch.float32, device=self.device)
        self._score(
            *(layer, q, weights, torch.full_like(counts, slot), counts),
            *(*self._query_scratch(rows), scores, counts),
            prompt=True,
        )
        return scores

    def _score(
        self,
        layer: LayerView,
        q: Tensor,
        weights: Tensor,
        slots: Tensor,
        lengths: Tensor,
        query: Tensor,
        weight: Tensor,
        scores: Tensor,
        counts: Tensor,
        prompt: bool = False,
    ) -> None:
        rows, pages = len(counts), layer.step.page_table
        queries, appended = q.shape[0] // rows, layer.step.appended
        sizes = self.several[queries - 1]
        # A program that multiplies several queries takes up as much as several programs.
        running = max(1, self.running // sizes["EACH"])
        keys, scales = self.pool(layer)
        q = q if q.stride(-1) == 1 else q.contiguous()
        # Queries of the keys' format are read where they are stored. Somebody else's kernel wrote
        # them then, behind which nothing is read before the wait.
        direct = not self.settings.fp8 and not self.settings.hadamard and q.dtype == keys.dtype
        if direct:
            query, weight = q, weights
        else:
            self._convert(q, weights, slots, appended, queries, query, weight)
        every = triton.cdiv(scores.shape[1], self.scoring["TILE"])
        if prompt:
            tiles = max(1, min(PROMPT_TILES, rows * every // running))
            programs, together = rows * triton.cdiv(every, tiles), 0
        else:
            programs, together, tiles = programs_of(rows, every, running), self.together, 0
        kernels.score_kernel[(programs,)](
            *(query.view(self.stored), weight, keys.view(self.stored), scales),
            *(slots, lengths, appended, pages, scores, counts, pages.stride(0)),
            *(query.stride(0), query.stride(1), weight.stride(0), weight.stride(1)),
            *(scores.stride(0), self.group.select, rows, running),
            *(waves_of(rows, running), rate_of(running), tiles),
            ROWS=together,
            PDL=self.early,
            AHEAD=0 if direct else AHEAD,
            **pdl.options(self.early),
            **sizes,
            **self.scoring,
        )

    def _convert(
        self,
        q: Tensor,
        weights: Tensor,
        slots: Tensor,
        appended: Tensor,
        queries: int,
        query: Tensor,
        weight: Tensor,
    ) -> None:
        """Write queries in the format of the keys, and weights that hold their scales."""
        kernels.query_kernel[(q.shape[0], triton.cdiv(self.heads, QUERY_HEADS))](
            *(_bits(q), weights, _bits(query), weight, slots, appended),
            *(q.stride(0), q.stride(1), weights.stride(0), weights.stride(1)),
            QUERIES=queries,
            Q_BF16=q.dtype is torch.bfloat16,
            PDL=self.early,
            **pdl.options(self.early),
            **self.querying,
        )


class DeepSeekDSATriton(KeptOfTokens, DeepSeekDSA):
    """The indexer by kernels.

    Attributes:
        work, prompt_work: top-k, in steps and for the rows of a prompt.
    """

    represent_tokens = key_kernels.write_keys
    rows = 32, 4

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        group = self.group
        self.launcher = Launcher(self.model, group, self.settings, setup.device, setup.max_queries)
        self.work = setup.topk(group.max_requests, group.max_units, group.select)
        self.prompt_work = setup.topk(PROMPT_ROWS, group.max_units, group.select)

    @property
    def options(self) -> tuple[int, ...]:
        settings = self.settings
        pool_bf16 = not settings.fp8 and self.model.dtype is torch.bfloat16
        levels = self.dim.bit_length() - 1
        return settings.fp8, settings.hadamard, settings.power_of_two, pool_bf16, levels

    @property
    def key_shape(self) -> tuple[int, int]:
        return 1, self.dim

    def keys(self, k: Tensor) -> Tensor:
        self.index_keys(k)  # refuses another shape
        return _bits(super().keys(k))

    def written(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        keys, scales = self.launcher.pool(layer)
        return _bits(keys), scales

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        q, weights = self._asked(q, weights, self.step_rows(layer, q))
        scores, counts = self.launcher.score(layer, q, weights)
        prefer_resident(layer, scores, counts, self.settings.sticky, impl="triton")
        topk(scores, counts, out.ids, impl="triton", work=self.work)
        return out

    @hookimpl
    def retrieve_prompt(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        q: Tensor,
        weights: Tensor | None,
        ids: Tensor,
    ) -> None:
        rows = q.shape[0]
        q, weights = self._asked(q, weights, (rows,))
        for at, counts in self.prompt_blocks(start, rows, 1, q.device):
            end = start + at.stop
            scores = self.launcher.prompt(layer, slot, end, counts, q[at], weights[at])
            topk(scores, counts, ids[at, 0], impl="triton", work=self.prompt_work)
