"""Splits, pieces and refusals of ``attend``; what the contract says is in test_conformance.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv.errors import CapabilityError
from topkv.types import Tables
from topkv_testing.backend.attend import check_attend
from topkv_testing.backend.bench import make_backend
from topkv_testing.backend.cases import AttendCase
from topkv_testing.kit import subject_of
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import CUDA, Tier, tier
from topkv_triton_attention import reference

KERNELS = tier("gpu" if CUDA else "interpret")
TIERS = [tier("cpu"), KERNELS]
if CUDA:
    TIERS.append(Tier("gpu", "reference", torch.device("cuda"), None))


def subject(where):
    return subject_of("triton_attention", "backend", where)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("unit", [1, 16])
def test_splits_of_any_number_agree(unit, splits):
    from topkv_triton_attention.launch import DecodeLaunch, Decoder

    geometry = Geometry(1, 4, 64, unit, 1, "shared", torch.bfloat16)
    inputs = AttendCase(geometry, (0, 1, 17, 100), 9, seed=splits).make()
    launch = DecodeLaunch(block=16, num_warps=4, num_stages=2, resident=1)
    decoder = Decoder(4, 4, 4, 64, 0.3, KERNELS.device, launch, splits)
    decoder.part.fill_(math.nan)
    decoder.part_lse.fill_(math.nan)
    check_attend(subject(KERNELS), decoder, 0.3, inputs)


@pytest.mark.parametrize("budget", [1, 3000])
def test_reference_in_pieces(monkeypatch, budget):
    monkeypatch.setattr(reference, "BUDGET", budget)
    geometry = Geometry(2, 2, 64, 2, 1, "shared", torch.float32)
    inputs = AttendCase(geometry, (31, 0, 9, 40), 3, "apart").make()
    backend, model, _ = make_backend(subject(tier("cpu")), geometry, 4)
    check_attend(subject(tier("cpu")), backend, model.scale, inputs)


@pytest.mark.parametrize("where", TIERS, ids=str)
def test_refuses_what_it_does_not_offer(where):
    geometry = Geometry(1, 1, 64, 1, 1, "shared", torch.float32)
    backend, _, _ = make_backend(subject(where), geometry, 2)
    inputs = AttendCase(geometry, (3, 2)).make()
    k, v = (each.to(where.device) for each in inputs.views())
    tables = Tables(inputs.table.to(where.device), inputs.lengths.to(where.device))
    q = inputs.q.to(where.device)
    for wrong, error, reason in (
        (q.expand(-1, 2, -1, -1), CapabilityError, "made for 1 queries a row"),
        (q.half(), CapabilityError, "share a dtype"),
        (q.repeat(2, 1, 1, 1), ValueError, "max_batch"),
    ):
        with pytest.raises(error, match=reason):
            backend.attend(wrong, k, v, tables, torch.empty_like(wrong), wrong[..., 0].float())


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 4096), st.integers(1, 2**17), st.integers(1, 800), st.sampled_from((16, 64)))
def test_split_count(programs, tokens, slots, block):
    from topkv_triton_attention.launch import MAX_SPLITS, MAX_WAVES, split_count

    splits = split_count(programs, tokens, slots, block)
    blocks = -(-tokens // block)
    assert 1 <= splits <= min(MAX_SPLITS, blocks)
    assert splits == 1 or programs * splits <= MAX_WAVES * slots
    run_of = -(-blocks // splits)
    assert (splits - 1) * run_of < blocks, "a split without tokens"


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 64), st.sampled_from((1, 8)), st.integers(1, 16), st.integers(1, 2**17))
def test_workspace_holds_every_call(lanes, kv_heads, group, tokens):
    from topkv_triton_attention.launch import Decoder, decode_launch, split_count

    decoder = Decoder(lanes, kv_heads * group, group, 64, 1.0, torch.device("cpu"))
    launch = decode_launch(64, 16, 2)
    slots = decoder.processors * launch.resident
    for some in range(1, lanes + 1):
        splits = split_count(some * kv_heads, tokens, slots, launch.block)
        if splits > 1:
            assert some * kv_heads * group * splits <= decoder.part_lse.numel()
