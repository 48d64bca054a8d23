"""``prefill`` of both implementations against a float64 oracle, key by key."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkv.types import GroupShape, ModelShape
from topkv_triton_attention import reference
from topkv_triton_attention.backend import TritonAttention

CUDA = torch.cuda.is_available()
TARGETS = [("reference", "cpu"), ("triton", "cuda" if CUDA else "cpu")]
if CUDA:
    TARGETS.append(("reference", "cuda"))


def backend_for(impl, device, heads, kv_heads, dim, dtype):
    model = ModelShape(1, heads, kv_heads, dim, dtype, dim**-0.5)
    group = GroupShape((0,), 1, 1, kv_heads, dim, dtype, 16, 4, 99, 8, 8, 2)
    return TritonAttention(model, group, impl, torch.device(device), 1)


def oracle(q, k, v, q_start, k_start, scale, dtype):
    """out and lse, one query and head at a time, in ``dtype``."""
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(rows, heads, dim, dtype=dtype)
    lse = torch.full((rows, heads), -math.inf, dtype=dtype)
    for i in range(rows):
        seen = [j for j in range(k.shape[0]) if k_start + j <= q_start + i]
        if not seen:
            continue
        for head in range(heads):
            logits = k[seen, head // group].to(dtype) @ q[i, head].to(dtype) * scale
            lse[i, head] = torch.logsumexp(logits, 0)
            out[i, head] = torch.softmax(logits, 0) @ v[seen, head // group].to(dtype)
    return out, lse


def check(backend, device, rows, keys, q_start, k_start, heads, kv_heads, dim, dtype, seed=0):
    torch.manual_seed(seed)
    q = (2 * torch.randn(heads, rows, dim)).to(dtype).transpose(0, 1)
    kv = torch.randn(keys, kv_heads, 2, dim).to(dtype)
    k, v = kv[:, :, 0], kv[:, :, 1]
    out = torch.full((rows, heads, dim), math.nan, device=device)
    lse = torch.full((rows, heads), math.nan, device=device)
    moved = [x.to(device) for x in (q, k, v)]
    backend.prefill(*moved, q_start, k_start, out, lse)
    out, lse = out.cpu().double(), lse.cpu().double()
    scale = backend.model.scale
    true_out, true_lse = oracle(q, k, v, q_start, k_start, scale, torch.float64)
    rough_out, _ = oracle(q, k, v, q_start, k_start, scale, dtype)
    _, rough_lse = oracle(q, k, v, q_start, k_start, scale, torch.float32)
    empty = true_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert not out[empty].any()
    assert not out.isnan().any()
    assert not lse.isnan().any()
    live = ~empty
    if not live.any():
        return
    size = max(1.0, true_out.abs().max().item())
    # Weights move by as much as a few fp32 roundings of their logits.
    logit = 8 * torch.finfo(torch.float32).eps * max(1.0, true_lse[live].abs().max().item())
    allowed = 2 * (rough_out - true_out).abs().max() + (torch.finfo(dtype).eps + logit) * size
    assert (out - true_out).abs().max() <= allowed
    allowed = 2 * (rough_lse - true_lse)[live].abs().max() + logit
    assert (lse - true_lse)[live].abs().max() <= allowed


@pytest.mark.parametrize(("impl", "device"), TARGETS)
def test_equals_the_oracle(impl, device):
    @settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
    @given(
        rows=st.one_of(st.sampled_from((1, 2)), st.integers(1, 40)),
        keys=st.integers(0, 80),
        ahead=st.sampled_from((-60, -1, 0, 1, 13, 80)),
        start=st.integers(0, 100),
        kv_heads=st.sampled_from((1, 2)),
        group=st.sampled_from((1, 2, 3)),
        dim=st.sampled_from((64, 96, 128, 256)),
        dtype=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
        seed=st.integers(0, 2**16),
    )
    def inner(rows, keys, ahead, start, kv_heads, group, dim, dtype, seed):
        backend = backend_for(impl, device, kv_heads * group, kv_heads, dim, dtype)
        sizes = (kv_heads * group, kv_heads, dim, dtype, seed)
        check(backend, device, rows, keys, start + 60 + ahead, start + 60, *sizes)

    inner()


@pytest.mark.parametrize(("impl", "device"), TARGETS)
@pytest.mark.parametrize(
    ("rows", "keys", "q_start", "k_start"),
    [
        (70, 70, 5, 5),  # a chunk over itself: whole blocks and blocks on the edge
        (130, 70, 30, 5),  # history that the first queries see in part
        (3, 90, 200, 0),  # history that all see
        (9, 20, 3, 40),  # nothing is seen
        (0, 5, 3, 0),  # nothing to do
    ],
)
def test_blocks(impl, device, rows, keys, q_start, k_start):
    backend = backend_for(impl, device, 2, 1, 64, torch.float16)
    check(backend, device, rows, keys, q_start, k_start, 2, 1, 64, torch.float16)


@pytest.mark.parametrize("budget", [1, 500])
def test_reference_in_pieces(monkeypatch, budget):
    monkeypatch.setattr(reference, "BUDGET", budget)
    backend = backend_for("reference", "cpu", 4, 2, 64, torch.float32)
    check(backend, "cpu", 21, 33, 12, 4, 4, 2, 64, torch.float32)


def test_two_blocks_merge_to_the_whole():
    torch.manual_seed(0)
    backend = backend_for("reference", "cpu", 2, 2, 64, torch.float32)
    q, k, v = torch.randn(3, 12, 2, 64)

    def part(keys, start):
        out, lse = torch.empty(12, 2, 64), torch.empty(12, 2)
        backend.prefill(q, k[keys], v[keys], 0, start, out, lse)
        return out, lse

    out, lse = reference.merge(*part(slice(0, 7), 0), *part(slice(7, 12), 7))
    whole, whole_lse = part(slice(0, 12), 0)
    eps = torch.finfo(torch.float32).eps
    assert torch.allclose(out, whole, rtol=0, atol=16 * eps)
    assert torch.allclose(lse, whole_lse, rtol=0, atol=16 * eps)
