"""Refusals of ``adapt_page_table`` beyond the contract; for that see test_conformance.py."""

from __future__ import annotations

import pytest
import torch

from plugins.triton_attention.tests.making import made
from topkv.types import GroupShape, LayerView, ModelShape, Plan, StepTensors, Tables

CUDA = torch.cuda.is_available()
TARGETS = [("reference", "cpu"), ("triton", "cuda" if CUDA else "cpu")]
if CUDA:
    TARGETS.append(("reference", "cuda"))


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("impl", "device"), TARGETS)
def test_refuses_a_table_of_another_width(impl, device):
    group = GroupShape((0,), 1, 1, 1, 64, torch.float16, 1, 1, 9, 4, 4, 1)
    model = ModelShape(1, 1, 1, 64, torch.float16, 1.0)
    backend = made(model, group, impl, torch.device(device), 1)
    empty = torch.empty(0)
    step = StepTensors(int32([0], device), int32([1], device), empty, empty, empty, empty)
    plan = Plan(int32([[0, 1, 2, 3]], device), int32([4], device), empty, empty, empty)
    view = LayerView(0, 0, group, step, empty, empty)
    tables = Tables(int32([[0] * 6], device), int32([0], device))
    with pytest.raises(ValueError, match="K or K \\+ 1"):
        backend.adapt_page_table(view, plan, tables)
