"""FlashInfer through topkv beside the bare library call, 2048 scattered tokens a lane.

    python plugins/flashinfer/benchmarks/attend.py --out flashinfer.jsonl

Each cell replays CUDA graphs of ``CALLS`` calls. ``library_us`` is ``run`` of a wrapper that was
planned with the true lengths and finds its CSR table ready, with the library's own choice of
dependent launches; ``plain_us`` is that without dependent launches. ``us`` is ``attend``, which
writes natural log-sum-exps and finds the pages that ``adapt_page_table`` wrote along with the
table. As in a step, that happens in the graph: once before the calls, the library's too, and is
not counted. ``table_us`` is the core's kernel that writes the table alone, ``adapt_us`` the one
that writes both. ``plan_ms`` is what the library's planning takes on the host.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape, Tables
from topkv_authoring.page_table import adapt_page_table
from topkv_flashinfer import plans, providers
from topkv_flashinfer.backend import FlashInfer
from topkv_testing.backend.plans import StepInputs
from topkv_testing.timing import graph_us

CALLS, REPEATS, TOKENS = 8, 9, 2048
HEADS, KV_HEADS, DIM = 32, 8, 128


def selected(group: GroupShape, batch: int) -> StepInputs:
    """A step whose plan selects K scattered slots of each lane's buffer, with a full tail."""
    step = StepInputs.empty(group, batch, "cuda")
    step.view.step.slots.copy_(torch.arange(batch))
    step.view.step.lengths.fill_(group.max_units * group.unit)
    step.plan.count.fill_(group.select)
    lanes = batch * group.lane_heads
    order = torch.rand(lanes, group.buffer_slots, device="cuda").argsort(1)
    step.plan.slots.copy_(order[:, : group.select])
    return step


def measure(batch: int, scope: str, unit: int) -> dict[str, object]:
    lane_heads = KV_HEADS if scope == "kv_head" else 1
    lanes, per_lane = batch * lane_heads, KV_HEADS // lane_heads
    select = TOKENS // unit - 1  # and a full tail, as in the last step before it closes
    model = ModelShape(1, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
    group = GroupShape(
        *((0,), unit, lane_heads, per_lane, DIM, torch.bfloat16, 128, batch, 131072 // unit),
        *(select, 2 * select, 2),
    )
    device = torch.device("cuda")
    backend = FlashInfer(BackendSetup(model, group, device, batch, model.group_size))
    pool = torch.randn(
        *(lanes * group.slots, per_lane, 2, unit, DIM), device=device, dtype=torch.bfloat16
    )
    k, v = pool[:, :, 0], pool[:, :, 1]
    table = torch.empty(lanes, select + 1, dtype=torch.int32, device=device)
    tables = Tables(table, torch.empty(lanes, dtype=torch.int32, device=device))
    q = torch.randn(batch, 1, HEADS, DIM, device=device, dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=device)
    ours = partial(backend.attend, q, k, v, tables, out, lse)
    step = selected(group, batch)
    call = (step.view, step.plan, tables)
    table_us = graph_us(*[partial(adapt_page_table, *call, impl="triton")] * CALLS)
    ours()  # plans, so that the table is written where the library reads it from now on
    adapt = partial(backend.adapt_page_table, *call)
    adapt_us = graph_us(*[adapt] * CALLS)

    def behind_table(attend: Callable[[], object]) -> float:
        return graph_us(*[attend] * CALLS, repeats=REPEATS, first=adapt)

    heads = HEADS // lane_heads
    queries, results = (each.view(lanes, heads, DIM) for each in (q, out))
    wrapper, plan_ms = planned(queries, k, table, TOKENS, model.scale)
    library = partial(
        wrapper.run, queries, (k, v), out=results, lse=lse.view(lanes, heads), return_lse=True
    )
    bare = behind_table(library)
    plain = behind_table(partial(library, enable_pdl=False))
    mine = behind_table(ours)
    moved = lanes * TOKENS * per_lane * 2 * DIM * 2
    return {
        "batch": batch,
        "scope": scope,
        "unit": unit,
        "us": round(mine, 2),
        "library_us": round(bare, 2),
        "plain_us": round(plain, 2),
        "ratio": round(mine / bare, 3),
        "table_us": round(table_us, 2),
        "adapt_us": round(adapt_us, 2),
        "tb_s": round(moved / mine / 1e6, 3),
        "plan_ms": round(plan_ms, 3),
    }


def planned(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, length: int, scale: float
) -> tuple[Any, float]:
    """The bare wrapper with true lengths, and milliseconds of a second plan."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    lanes, unit, device = len(q), k.shape[2], q.device
    pages = -(-length // unit)
    indptr = plans.ramp(lanes, pages)
    last = torch.full((lanes,), (length - 1) % unit + 1, dtype=torch.int32)
    indices = table[:, :pages].reshape(-1).contiguous()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device=device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.to(device),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.to(device),
        backend="fa2",
    )
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        wrapper.plan(
            *(indptr, indices, last, q.shape[1], k.shape[1], DIM, unit),
            q_data_type=q.dtype,
            kv_data_type=k.dtype,
            sm_scale=scale,
        )
        torch.cuda.synchronize()
        taken = (time.perf_counter() - begin) * 1e3
    return wrapper, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    options = parser.parse_args()
    torch.manual_seed(0)
    cells: list[dict[str, object]] = [
        {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "flashinfer": providers.version(),
        }
    ]
    for scope in ("shared", "kv_head"):
        for unit in (1, 16, 64):
            for batch in (1, 8, 32, 64):
                cells.append(measure(batch, scope, unit))
                print(cells[-1], flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
