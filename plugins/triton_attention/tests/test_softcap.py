"""Capped logits beside float64: small ones, such as fill the cap, and such as overflow an exp."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plugins.triton_attention.tests.making import made
from topkv.errors import CapabilityError
from topkv.types import ModelShape, Tables
from topkv_testing.backend.bench import make_backend
from topkv_testing.kit import subject_of
from topkv_testing.oracle import attention
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import CUDA, tier

TIERS = [tier("cpu"), tier("gpu" if CUDA else "interpret")]
GEOMETRY = Geometry(2, 3, 64, 4, 4, "shared", torch.float32)


def backend_of(where, softcap, scale):
    subject = subject_of("triton_attention", "backend", where)
    _, model, group = make_backend(subject, GEOMETRY, 2)
    model = evolve(model, softcap=softcap, scale=scale)
    return made(model, group, where.impl, where.device, 2, 4), model


def inputs(rows, keys, size, seed):
    generator = torch.Generator().manual_seed(seed)
    q = size * torch.randn(rows, 6, 64, generator=generator)
    k, v = torch.randn(2, keys, 2, 64, generator=generator)
    return q, k, v


SIZES = st.sampled_from([1e-3, 1.0, 30.0, 1e4, 1e30])
CAPS = st.sampled_from([0.5, 30.0, 50.0, 1e3])


def band(softcap):
    """Logits are rounded at the size of the cap."""
    return 64 * torch.finfo(torch.float32).eps * max(1.0, softcap)


@pytest.mark.parametrize("where", TIERS, ids=str)
def test_a_prompt_is_that_of_float64(where):
    @settings(max_examples=40 if where.name == "cpu" else 8)
    @example(1e30, 50.0, 21, 12, 0)
    @example(1.0, 0.5, 5, 0, 0)
    @given(SIZES, CAPS, st.integers(1, 40), st.integers(0, 30), st.integers(0, 99))
    def check(size, softcap, rows, before, seed):
        backend, model = backend_of(where, softcap, 0.2)
        q, k, v = inputs(rows, rows + before, size, seed)
        out = torch.full_like(q, math.nan).to(where.device)
        lse = torch.full(q.shape[:2], math.nan, device=where.device)
        backend.prefill(*(each.to(where.device) for each in (q, k, v)), before, 0, out, lse)
        seen = torch.arange(len(k)) <= torch.arange(before, before + len(q))[:, None]
        expected, norm = attention(q, k, v, model.scale, seen, softcap)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=8 * band(softcap))
        torch.testing.assert_close(lse.cpu().double(), norm, rtol=0, atol=band(softcap))

    check()


@pytest.mark.parametrize("where", TIERS, ids=str)
def test_a_step_is_that_of_float64(where):
    @settings(max_examples=40 if where.name == "cpu" else 8)
    @example(1e30, 50.0, 37, 1, 0)
    @example(1.0, 0.5, 1, 1, 0)
    @example(1e30, 50.0, 37, 3, 0)
    @given(SIZES, CAPS, st.integers(1, 60), st.integers(1, 4), st.integers(0, 99))
    def check(size, softcap, length, most, seed):
        backend, model = backend_of(where, softcap, 0.2)
        most = min(most, length)
        q, k, v = inputs(most, length, size, seed)
        units = -(-length // 4)
        slots = torch.zeros(2, units, 2, 4, 64)
        for slot, each in zip(slots, (k, v), strict=True):
            padded = torch.nn.functional.pad(each, (0, 0, 0, 0, 0, units * 4 - length))
            slot.copy_(padded.view(units, 4, 2, 64).transpose(1, 2))
        table = torch.arange(units, dtype=torch.int32)[None]
        lengths = torch.full((1,), length, dtype=torch.int32)
        tables = Tables(table.to(where.device), lengths.to(where.device))
        if most > 1:
            tables.queries = torch.full((1,), most, dtype=torch.int32, device=where.device)
        out = torch.full((1, most, 6, 64), math.nan, device=where.device)
        lse = torch.full((1, most, 6), math.nan, device=where.device)
        pools = (each.to(where.device) for each in slots)
        backend.attend(q[None].to(where.device), *pools, tables, out, lse)
        seen = torch.arange(length) <= torch.arange(length - most, length)[:, None]
        expected, norm = attention(q, k, v, model.scale, seen, softcap)
        torch.testing.assert_close(out[0].cpu().double(), expected, rtol=0, atol=8 * band(softcap))
        torch.testing.assert_close(lse[0].cpu().double(), norm, rtol=0, atol=band(softcap))

    check()


def test_latent_rows_are_refused():
    model = ModelShape(1, 4, 1, 40, torch.float32, 0.2, "mla", 32, softcap=30.0)
    _, _, group = make_backend(subject_of("triton_attention", "backend", TIERS[0]), GEOMETRY, 2)
    with pytest.raises(CapabilityError, match="softcap"):
        made(model, group, "reference", torch.device("cpu"), 2)
