"""``adapt_page_table`` of both implementations against the sentence of the hook spec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkv.types import GroupShape, LayerView, ModelShape, Plan, StepTensors
from topkv_triton_attention.backend import TritonAttention

CUDA = torch.cuda.is_available()
TARGETS = [("reference", "cpu"), ("triton", "cuda" if CUDA else "cpu")]
if CUDA:
    TARGETS.append(("reference", "cuda"))


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(impl, device, *, select, unit, heads, ring, requests, tail, seed):
    """``requests``: (slot, length, how many units the lanes of the row selected)."""
    buffer = select + 3
    model = ModelShape(1, heads * 2, heads, 64, torch.float16, 1.0)
    group = GroupShape(
        (0,), unit, heads, 1, 64, torch.float16, 128, 50, 99, select, buffer, ring
    )  # fmt: skip
    backend = TritonAttention(model, group, impl, torch.device(device), len(requests))
    random = torch.Generator().manual_seed(seed)
    lanes = len(requests) * heads
    slots, counts, want, want_lengths = [], [], [], []
    for slot, length, count in requests:
        for head in range(heads):
            mine = torch.randperm(buffer, generator=random)[:count].tolist()
            slots.append(mine + [-1] * (select - count))
            counts.append(count)
            row, used, tokens = slot * heads + head, [], 0
            if slot >= 0 and length > 0:
                used = [row * (buffer + ring) + each for each in mine]
                tokens = count * unit
                if tail:
                    at = buffer + (length - 1) // unit % ring
                    used.append(row * (buffer + ring) + at)
                    tokens += (length - 1) % unit + 1
            want.append(used + [0] * (select + tail - len(used)))
            want_lengths.append(tokens)
    empty = torch.empty(0)
    step = StepTensors(
        slots=int32([each[0] for each in requests], device),
        lengths=int32([each[1] for each in requests], device),
        high=empty, appended=empty, resident=empty, page_table=empty,
    )  # fmt: skip
    plan = Plan(int32(slots, device), int32(counts, device), empty, empty, empty)
    table = torch.full((lanes, select + tail), -7, dtype=torch.int32, device=device)
    lengths = torch.full((lanes,), -7, dtype=torch.int32, device=device)
    view = LayerView(0, 0, group, step, empty, empty)
    backend.adapt_page_table(view, plan, table, lengths)
    assert table.tolist() == want
    assert lengths.tolist() == want_lengths


@pytest.mark.parametrize(("impl", "device"), TARGETS)
def test_follows_the_spec(impl, device):
    @settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def inner(data):
        select = data.draw(st.integers(1, 40))
        row = st.one_of(
            st.tuples(st.integers(0, 49), st.integers(1, 5000), st.integers(0, select)),
            st.tuples(st.just(-1), st.just(0), st.integers(0, select)),
        )
        check(
            impl,
            device,
            select=select,
            unit=data.draw(st.sampled_from((1, 2, 16, 128))),
            heads=data.draw(st.sampled_from((1, 2, 8))),
            ring=data.draw(st.integers(1, 5)),
            requests=data.draw(st.lists(row, min_size=1, max_size=4)),
            tail=data.draw(st.booleans()),
            seed=data.draw(st.integers(0, 2**16)),
        )

    inner()


@pytest.mark.parametrize(("impl", "device"), TARGETS)
@pytest.mark.parametrize("select", [1, 1023, 1024, 4096])
def test_widths(impl, device, select):
    requests = [(3, 10, select), (-1, 0, 0), (0, 10, select // 2)]
    check(
        impl, device, select=select, unit=1, heads=2, ring=2, requests=requests, tail=True, seed=0
    )


@pytest.mark.parametrize(("impl", "device"), TARGETS)
def test_refuses_a_table_of_another_width(impl, device):
    group = GroupShape((0,), 1, 1, 1, 64, torch.float16, 1, 1, 9, 4, 4, 1)
    model = ModelShape(1, 1, 1, 64, torch.float16, 1.0)
    backend = TritonAttention(model, group, impl, torch.device(device), 1)
    empty = torch.empty(0)
    step = StepTensors(int32([0], device), int32([1], device), empty, empty, empty, empty)
    plan = Plan(int32([[0, 1, 2, 3]], device), int32([4], device), empty, empty, empty)
    view = LayerView(0, 0, group, step, empty, empty)
    with pytest.raises(ValueError, match="K or K \\+ 1"):
        backend.adapt_page_table(view, plan, int32([[0] * 6], device), int32([0], device))
