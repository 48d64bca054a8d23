"""``prefill`` of this backend beyond the contract; for that see test_conformance.py."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve

from topkv_testing.backend.bench import make_backend
from topkv_testing.backend.prefill import PrefillCase
from topkv_testing.kit import subject_of
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import CUDA, Tier, tier
from topkv_triton_attention import reference

PLAIN = Geometry(1, 2, 64, 1, 1, "shared", torch.float16)
TIERS = [tier("cpu"), tier("gpu" if CUDA else "interpret")]
if CUDA:
    TIERS.append(Tier("gpu", "reference", torch.device("cuda"), None))


def subject(where):
    return subject_of("triton_attention", "backend", where)


@pytest.mark.parametrize("where", TIERS, ids=str)
def test_no_queries_are_nothing_to_do(where):
    backend, _, _ = make_backend(subject(where), PLAIN, 1)
    case = PrefillCase(PLAIN, 0, 5, 3, 0)
    case.run(backend, case.make(), where.device)


@pytest.mark.parametrize("where", TIERS, ids=str)
@pytest.mark.parametrize("dim", [64, 96])
def test_queries_that_lie_head_by_head(where, dim):
    geometry = evolve(PLAIN, kv_heads=2, dim=dim)
    backend, model, _ = make_backend(subject(where), geometry, 1)
    case = PrefillCase(geometry, 21, 33, 12, 4)
    inputs = case.make()
    q = inputs.q.transpose(0, 1).contiguous().transpose(0, 1).to(where.device)
    k, v = (each.to(where.device) for each in inputs.views(inputs.pool))
    out = torch.full(q.shape, math.nan, device=where.device)
    lse = torch.full(q.shape[:2], math.nan, device=where.device)
    backend.prefill(q, k, v, case.q_start, case.k_start, out, lse)
    case.expected(inputs, model.scale).check(out.cpu(), lse.cpu())


@pytest.mark.parametrize("budget", [1, 500])
def test_reference_in_pieces(monkeypatch, budget):
    monkeypatch.setattr(reference, "BUDGET", budget)
    geometry = Geometry(2, 2, 64, 1, 1, "shared", torch.float32)
    PrefillCase(geometry, 21, 33, 12, 4).check(subject(tier("cpu")))


def test_two_blocks_merge_to_the_whole():
    torch.manual_seed(0)
    geometry = Geometry(2, 1, 64, 1, 1, "shared", torch.float32)
    backend, _, _ = make_backend(subject(tier("cpu")), geometry, 1)
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
