"""One layer with its page table and pool, and an oracle in float64.

Without a CUDA device the kernels run in Triton's interpreter; with one, on the device.
"""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch

from topkv_deepseek_dsa.entry import topkv_register_algorithms
from topkv_testing.kit import params_of

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.hooks.algorithm import AlgorithmSetup  # noqa: E402
from topkv.hooks.topk import TopKSetup  # noqa: E402
from topkv.ops.topk import RadixTopK  # noqa: E402
from topkv.types import GroupShape, IndexerShape, LayerView, ModelShape, Selection, StepTensors  # noqa: E402
from topkv_deepseek_dsa.algorithm import DeepSeekDSA  # noqa: E402
from topkv_deepseek_dsa.launch import DeepSeekDSATriton  # noqa: E402

MADE = {"reference": DeepSeekDSA, "triton": DeepSeekDSATriton}
NAN = math.nan
POISON = 0xFF
"""Byte that is NaN as an e4m3 code, and four times as an fp32 scale."""


@functools.cache
def e4m3():
    """Float64 value of each of the 256 codes, worked out from the format; NaN for 0x7f, 0xff."""
    values = []
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        value = (
            fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        )
        values.append(NAN if code & 127 == 127 else -value if code & 128 else value)
    return torch.tensor(values, dtype=torch.float64)


def nearest(x, power_of_two=False):
    """Codes, int64, and float64 scales: of two equally near codes the even one."""
    most = x.float().abs().amax(-1).clamp(min=1e-4)
    scale = (most.double() / 448).float().double()
    if power_of_two:
        scale = 2.0 ** torch.ceil(torch.log2(scale))
    value = (x.double() / scale[..., None]).float().double().clamp(-448, 448)
    table = e4m3()[:127]
    above = torch.searchsorted(table, value.abs()).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = table[above] - value.abs(), value.abs() - table[below]
    codes = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    codes = torch.where(up == 0, above, codes)
    return codes + 128 * torch.signbit(x).long(), scale


class World:
    """A model of one layer; ``keys[slot]`` is what each request was given, on the CPU."""

    def __init__(
        self,
        impl,
        device,
        *,
        keys="fp8",
        hadamard=False,
        scale_format="fp32",
        dtype=torch.bfloat16,
        heads=4,
        dim=16,
        page=64,
        pages=4,
        select=8,
        requests=3,
        seed=0,
        spare=0,
        max_queries=1,
    ):
        self.max_queries = max_queries
        self.device, self.page, self.fp8 = torch.device(device), page, keys == "fp8"
        self.power_of_two = scale_format == "ue8m0"
        self.model = ModelShape(
            num_layers=1,
            num_heads=8,
            num_kv_heads=1,
            head_dim=24,
            dtype=dtype,
            scale=0.25,
            attention="mla",
            value_dim=16,
            indexer=IndexerShape(heads, dim),
        )
        self.group = GroupShape(
            layers=(0,),
            unit=1,
            lane_heads=1,
            heads_per_lane=1,
            head_dim=24,
            dtype=dtype,
            page_tokens=page,
            max_requests=requests,
            max_units=pages * page,
            select=select,
            buffer_slots=2 * select,
            ring_slots=4,
            planes=1,
        )
        params = {"keys": keys, "hadamard": hadamard, "scale_format": scale_format}
        self.heads, self.dim = heads, dim
        self.indexer = self.make(impl, params)
        self.generator = torch.Generator().manual_seed(seed)
        (spec,) = self.indexer.spec().representations
        first, count = 1 + spare, 1 + spare + requests * pages
        self.pool = torch.empty((count * page, *spec.shape), dtype=spec.dtype, device=device)
        self.pool.view(torch.uint8).fill_(POISON)
        table = first + torch.randperm(count - first, generator=self.generator).view(
            requests, pages
        )
        ints = {"dtype": torch.int32, "device": device}
        zeros = [torch.zeros(requests, **ints) for _ in range(5)]
        self.table = table.to(**ints)
        ring = torch.full((requests, 1, 4, 1, 1, 24), NAN, dtype=dtype, device=device)
        step = StepTensors(*zeros, self.table)
        self.layer = LayerView(0, 0, self.group, step, ring, ring, {"index": self.pool})
        self.keys = {slot: self.random(0) for slot in range(requests)}

    def make(self, impl, params, model=None, group=None):
        """An instance for this world, or for another model or group."""
        setup = AlgorithmSetup(
            *(
                model or self.model,
                group or self.group,
                params_of(topkv_register_algorithms()[0], params),
            ),
            *(self.device, self._topk, self.max_queries),
        )
        return MADE[impl](setup)

    def _topk(self, *sizes):
        return RadixTopK(TopKSetup(*sizes, self.device))

    @classmethod
    def filled(cls, *args, lengths=(250, 70, 5), **kwargs):
        """A world with prefilled requests of these lengths."""
        made = cls(*args, **kwargs)
        for slot, length in enumerate(lengths):
            made.prefill(slot, made.random(length))
        return made

    def random(self, count):
        return torch.randn(count, self.dim, generator=self.generator).to(self.model.dtype)

    def queries(self, rows):
        """Queries ``[rows, 1, H, D]`` and weights of both signs, fp32 ``[rows, H]``."""
        q, weights = self.several(rows, 1)
        return q, weights[:, 0]

    def several(self, rows, queries):
        """``[rows, Q, H, D]`` and ``[rows, Q, H]`` of the same."""
        q = torch.randn(rows, queries, self.heads, self.dim, generator=self.generator)
        weights = torch.randn(rows, queries, self.heads, generator=self.generator)
        return q.to(self.model.dtype), weights

    def prefill(self, slot, keys, chunks=()):
        """Construct in chunks that end at the given positions."""
        self.keys[slot] = keys
        start = 0
        for end in (*chunks, len(keys)):
            self.construct(slot, start, keys[start:end])
            start = end

    def construct(self, slot, start, keys):
        nothing = torch.empty(0, device=self.device)
        keys = keys[:, None].to(self.device)
        self.indexer.construct(self.layer, slot, start, keys, nothing, nothing, nothing)

    def rows(self, slots, appended=0, each=()):
        """Step tensors of a batch of these slots; -1 pads. Rows append one number, or ``each``."""
        ints = {"dtype": torch.int32, "device": self.device}
        lengths = [len(self.keys[slot]) if slot >= 0 else 0 for slot in slots]
        each = each or [appended * (slot >= 0) for slot in slots]
        values = (slots, lengths, lengths, each)
        fixed = [torch.tensor(value, **ints) for value in values]
        self.layer.step = StepTensors(*fixed, torch.zeros(len(slots), **ints), self.table)

    def append(self, slots, keys):
        """Decode one token ``[D]`` for each row."""
        for slot, key in zip(slots, keys, strict=True):
            if slot >= 0:
                self.keys[slot] = torch.cat([self.keys[slot], key[None]])
        self.rows(slots, appended=1)
        self.update(keys)

    def update(self, keys):
        """Follow the tokens ``[B, D]`` of rows that are set."""
        nothing = torch.empty(0, device=self.device)
        self.indexer.update(self.layer, keys[:, None, None].to(self.device), nothing)

    def retrieve(self, q, weights, slots):
        """ids ``[B, K]`` from a poisoned result, checked for form, as sets."""
        return self.retrieve_several(
            q, weights[:, None], slots, [0] * len(slots), [0] * len(slots)
        )

    def retrieve_several(self, q, weights, slots, appended, left=None):
        """Sets of rows ``[B, Q]`` that append a number of tokens each. The newest ``left`` of a
        row are not selectable, those that it appends if None."""
        self.rows(slots, each=appended)
        ids = torch.full((len(slots), self.group.select), -7, dtype=torch.int32).to(self.device)
        inputs = (self.layer, q.to(self.device), weights.to(self.device))
        self.indexer.retrieve_topk(*inputs, Selection(ids))
        lengths = [len(self.keys[slot]) if slot >= 0 else 0 for slot in slots]
        left = [max(count, 1) for count in appended] if left is None else left
        return self.formed(ids, [max(n - m, 0) for n, m in zip(lengths, left, strict=True)])

    def prompt(self, slot, start, q, weights):
        """Sets of ``retrieve_prompt`` for queries ``[m, H, D]``."""
        ids = torch.full((len(q), 1, self.group.select), -7, dtype=torch.int32).to(self.device)
        self.indexer.retrieve_prompt(
            self.layer, slot, start, q.to(self.device), weights.to(self.device), ids
        )
        return self.formed(ids[:, 0], range(start + 1, start + len(q) + 1))

    def formed(self, ids, lengths):
        """Check that each row is ascending, complete and in range; return sets."""
        sets = []
        for row, length in zip(ids.tolist(), lengths, strict=True):
            valid = row[: min(length, self.group.select)]
            assert row == sorted(set(valid)) + [-1] * (len(row) - len(valid))
            assert all(0 <= token < length for token in valid)
            sets.append(set(valid))
        return sets

    def host(self, slot, tokens):
        """Host rows, int64 on the CPU, of tokens (a tensor) of a request."""
        return self.table[slot].cpu().long()[tokens // self.page] * self.page + tokens % self.page

    def place(self, slot, tokens):
        """Byte offsets of the codes and of the scales of tokens in an fp8 pool."""
        at = self.host(slot, tokens)
        first = at // 64 * (64 * (self.dim + 4))
        return first + at % 64 * self.dim, first + 64 * self.dim + at % 64 * 4

    def stored(self, slot, tokens):
        """Codes and scales of tokens as stored: uint8 ``[n, D]`` and fp32 ``[n]``, on the CPU."""
        flat = self.pool.view(-1)
        codes, scales = (x[:, None] for x in self.place(slot, tokens))
        codes = flat[(codes + torch.arange(self.dim)).to(self.device)].cpu()
        scales = flat[(scales + torch.arange(4)).to(self.device)].cpu()
        return codes, scales.view(torch.float32)[:, 0]

    def bytes_of(self, slot, tokens):
        """Offsets in the pool, as bytes, of everything that is kept of these tokens."""
        if self.fp8:
            codes, scales = (x[:, None] for x in self.place(slot, tokens))
            own = [codes + torch.arange(self.dim), scales + torch.arange(4)]
            return torch.cat(own, dim=1).flatten()
        width = self.dim * self.pool.element_size()
        return (self.host(slot, tokens)[:, None] * width + torch.arange(width)).flatten()

    def overwrite(self, slot, tokens, value):
        """Set every byte of these tokens."""
        self.pool.view(-1).view(torch.uint8)[self.bytes_of(slot, tokens).to(self.device)] = value

    def decoded(self, slot):
        """float64 keys ``[n, D]`` as a reader of the bytes of the pool understands them."""
        tokens = torch.arange(len(self.keys[slot]))
        if not self.fp8:
            return self.pool[self.host(slot, tokens).to(self.device)].cpu().double()
        codes, scales = self.stored(slot, tokens)
        return e4m3()[codes.long()] * scales.double()[:, None]

    def rounded(self, q):
        """float64 queries ``[H, D]`` in the precision of the keys."""
        if not self.fp8:
            return q.to(self.pool.dtype).double()
        codes, scale = nearest(q, self.power_of_two)
        return e4m3()[codes] * scale[..., None]

    def oracle(self, slot, q, weights):
        """float64 scores ``[n]`` of queries ``[H, D]``, from the bytes of the pool."""
        products = self.rounded(q) @ self.decoded(slot).T
        return weights.double() @ products.relu()

    def rough(self, slot, q, weights):
        """Scores as in ``oracle``, by plain fp32."""
        products = self.rounded(q).float() @ self.decoded(slot).float().T
        return weights.float() @ products.relu()

    def slack(self, slot, q, weights):
        """Error beyond that of fp32 sums that a product of e4m3 on tensor cores may have.

        Tensor cores line up the terms of a sum with the largest and keep some 14 bits of each.
        """
        kernels = isinstance(self.indexer, DeepSeekDSATriton)
        if not kernels or self.indexer.launcher.stored is not torch.float8_e4m3fn:
            return 0.0
        terms = self.rounded(q).abs() @ self.decoded(slot).abs().T
        return float((weights.double().abs() @ terms).max()) * 2.0**-9


@pytest.fixture(scope="session")
def world():
    return World


@pytest.fixture(scope="session")
def values():
    return e4m3()


@pytest.fixture(scope="session")
def encode():
    return nearest


def pytest_generate_tests(metafunc):
    gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
    if {"impl", "device"} <= set(metafunc.fixturenames):
        cases = [
            pytest.param("reference", "cpu"),
            pytest.param("reference", "cuda", marks=gpu),
            pytest.param("triton", "cuda", marks=gpu),
        ]
        if not CUDA:
            cases.append(pytest.param("triton", "cpu"))
        metafunc.parametrize(("impl", "device"), cases)
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [pytest.param("cuda", marks=gpu)] + ["cpu"] * (not CUDA))
    if "form" in metafunc.fixturenames:
        metafunc.parametrize("form", ["bf16", "fp8"])
