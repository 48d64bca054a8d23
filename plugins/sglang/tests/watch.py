"""A plugin of SGLang that looks into the scheduler of a test between two steps."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch

SEEN = Counter()
"""Steps of this scheduler, by their kind."""

EVERY = 5
"""Steps from one check of pages and maps to the next: it takes longer than a step."""


def register():
    """Hook the scheduler; SGLang calls this in each of its processes."""
    if not torch.cuda.is_available():
        pin_nothing()
        torch.cuda.get_device_capability = hopper
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler"
    state = f"{scheduler}_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(f"{scheduler}.Scheduler.process_batch_result", look, HookType.BEFORE)
    HookRegistry.register(f"{state}.get_internal_state", show, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.Scheduler.__init__", extend, HookType.AFTER)


def hopper(*device):
    """Answer for a device that is not there: SGLang asks where a model has an indexer, and nothing
    follows from it here."""
    return 9, 0


def pin_nothing():
    """Let SGLang's adapters pin memory on a CPU, where there is none to be pinned."""
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        setattr(torch, name, partial(unpinned, getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *device: self


def unpinned(make, *data, pin_memory=False, **named):
    """Make a tensor in memory that is not pinned."""
    return make(*data, **named)


def extend(made, scheduler, *more, **named):
    """Let schedulers be asked whether pages and maps add up, and whether ranks share a pool."""
    scheduler.check_integrity = lambda: everywhere(scheduler, check)
    scheduler.check_pool_is_shared = lambda: everywhere(scheduler, check_pool_is_shared)


def everywhere(scheduler, call):
    """Call a function on all ranks; raise what any of them raises, for one alone answers."""
    from torch.distributed import all_gather_object

    error, group = None, scheduler.tp_group
    try:
        call(scheduler)
    except Exception as raised:
        error = f"rank {group.rank_in_group}: {raised!r}"
    errors = [None] * group.world_size
    all_gather_object(errors, error, group=group.cpu_group)
    if any(errors):
        raise AssertionError(errors)


def check_pool_is_shared(scheduler):
    """Each rank reads what all ranks write to a page that is no request's."""
    from torch.distributed import barrier

    group, session = scheduler.tp_group, scheduler.tp_worker.model_runner.topkv_session
    pool = session.coordinator.manager.host.bytes
    pool[group.rank_in_group] = 100 + group.rank_in_group
    barrier(group=group.cpu_group)
    found = pool[: group.world_size].tolist()
    assert found == [100 + rank for rank in range(group.world_size)], found


def check(scheduler):
    """Check topkv's pages and maps, where it serves."""
    session = getattr(scheduler.tp_worker.model_runner, "topkv_session", None)
    if session is not None:
        from topkv_testing.integrity import check_integrity

        check_integrity(session.coordinator)


def look(scheduler, batch, *more, **named):
    """Count a step, and check topkv's pages and maps now and then."""
    SEEN[batch.forward_mode.name.lower()] += 1
    if sum(SEEN.values()) % EVERY == 0:
        check(scheduler)


def show(output, controller, *more, **named):
    """Add counts to the state of a scheduler, and what SGLang has free."""
    output.internal_state["watched"] = {**SEEN, **watched(controller.scheduler)}
    return output


def watched(scheduler):
    """Return rows and tokens that SGLang has given out, and how it runs."""
    rows, pool = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    return {
        "rows": rows.size - len(rows.free_slots),
        "tokens": pool.size - pool.available_size() - scheduler.tree_cache.evictable_size(),
        "capacity": pool.size,
        "overlap": scheduler.enable_overlap,
    }
