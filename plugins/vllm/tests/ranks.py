"""Calls by which tests control tensor parallel ranks, each a process of its own."""

from __future__ import annotations

from topkv_testing.integrity import check_integrity

SETTINGS = {"backend": "triton_attention", "dense_layers": [], "max_tokens": 2048, "poison": True}


def use(engine, settings):
    """Give the ranks of an engine coordinators with other settings, which takes no time, where a
    start takes many seconds. Graphs are recorded again."""

    def anew(worker, settings):
        from topkv import SparseConfig
        from topkv_vllm.geometry import lowered_for
        from topkv_vllm.layers import shape_of_layers

        config = worker.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        shape = shape_of_layers([layer.impl for layer in layers], config.model_config.dtype)
        worker.session.close()
        worker.allocate(lowered_for(config, SparseConfig.load(settings), shape))
        manager = getattr(worker.model_runner, "cudagraph_manager", None)
        if manager is not None and manager.graphs:
            left = manager.graphs  # PyTorch wants one in the pool while it captures others there
            manager.graphs = {}
            worker.model_runner.capture_model()
            del left

    engine.llm.collective_rpc(anew, args=({**SETTINGS, **settings},))


def ranks_of(engine):
    """Pages, slots and counts of each rank."""

    def reported(worker):
        session = worker.session
        coordinator, requests = session.coordinator, session.requests
        check_integrity(coordinator)
        model, counts = coordinator.model, coordinator.transfers_of()
        return {
            "heads": (model.num_heads, model.num_kv_heads),
            "slots": {name: held.slot for name, held in requests.held.items()},
            "pages": {
                name: [*coordinator.requests.pages.of(held.slot)]
                for name, held in requests.held.items()
            },
            "lengths": coordinator.requests.length.tolist(),
            "used": coordinator.manager.host.used,
            "num_pages": coordinator.config.num_pages,
            "misses": counts.misses,
            "hits": counts.hits,
        }

    return engine.llm.collective_rpc(reported)


def check_nothing_is_held(engine):
    """Pages add up on each rank, and no request holds one."""
    for rank in ranks_of(engine):
        assert (rank["used"], rank["slots"]) == (0, {})


def pools_of(engine):
    """Ranks that have the host pool of each rank: each writes where no request ever does."""

    def write(worker):
        worker.session.coordinator.manager.host.bytes[worker.rank] = 100 + worker.rank

    def read(worker, ranks):
        written = worker.session.coordinator.manager.host.bytes[:ranks].tolist()
        return [rank for rank, byte in enumerate(written) if byte == 100 + rank]

    ranks = len(engine.llm.collective_rpc(write))
    return engine.llm.collective_rpc(read, args=(ranks,))
