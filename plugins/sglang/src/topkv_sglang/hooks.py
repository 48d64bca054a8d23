"""Hooks on SGLang. Each passes on to SGLang's own where another attention backend is chosen.

A hook gets what it stands around first. All of them run in the one thread of a scheduler, but for
``check_arguments``, which the process runs that starts schedulers. Every process of SGLang has
them, used or not, so nothing of topkv is imported before it is needed.
"""

from __future__ import annotations

from typing import Any

from topkv_sglang.args import BACKEND
from topkv_sglang.place_hooks import PLACE_HOOKS
from topkv_sglang.used import Hook, used


def check_arguments(original: Hook, arguments: Any) -> None:
    """Refuse what cannot be served, where an engine or a server is started.

    Raises:
        CapabilityError, ConfigError, PluginError: see ``topkv_sglang.refusals.check``.
    """
    from sglang.srt.arg_groups.model_override_base import (
        attention_backends_of,
        model_config_of,
        resolving_view,
    )

    original(arguments)
    view = resolving_view(arguments)
    if BACKEND not in attention_backends_of(view):
        return
    from sglang.version import __version__

    from topkv_sglang.refusals import check

    _check_hooks()
    check(view, model_config_of(arguments), __version__)


def _check_hooks() -> None:
    """Refuse a process that has not taken every hook; SGLang only logs that.

    Raises:
        CapabilityError: with each that is missing.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from topkv.errors import CapabilityError

    missing = [target for target in HOOKS if target not in HookRegistry._patched]
    if missing:
        reasons = [f"SGLang has not taken the hook on {target}; see its log" for target in missing]
        raise CapabilityError("topkv is not whole in this process", reasons)


def resolve_attention(original: Hook, arguments: Any) -> None:
    """Turn SGLang's CUDA graphs of prompts off: a coordinator reads prompts outside of graphs."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolving_view

    original(arguments)
    view = resolving_view(arguments)
    if BACKEND not in attention_backends_of(view):
        return
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = with_phase(view.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
    declare_resolution(arguments, BACKEND, cuda_graph_config=config)


def resolve_indexer(original: Hook, view: Any) -> dict[str, Any]:
    """Leave arguments of SGLang's own sparse attention alone: a coordinator keeps rows, selects
    and attends."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of

    return {} if BACKEND in attention_backends_of(view) else dict(original(view))


def plan_pool_growth(original: Hook, arguments: Any) -> bool:
    """Return False for topkv: SGLang's pool does not grow by what graphs have left."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolving_view

    if BACKEND in attention_backends_of(resolving_view(arguments)):
        return False
    return bool(original(arguments))


def load_model(original: Hook, runner: Any) -> None:
    """Load a model, and look at its layers; arguments were checked where the engine was started.

    Raises:
        CapabilityError: a hook is missing, before weights are loaded, or a layer attends in a way
            that topkv does not know.
    """
    if not used():
        original(runner)
        return
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.layers.radix_attention import RadixAttention

    from topkv_sglang.geometry import lowered_for, shape_of_layers
    from topkv_sglang.latent import attend_absorbed, indexer_of_config, latent_layers
    from topkv_sglang.refusals import settings_of

    _check_hooks()
    original(runner)
    model, arguments = runner.model_config, resolving_view(runner.server_args)
    if runner.use_mla_backend:
        attend_absorbed()
        layers, indexer = latent_layers(runner.model), indexer_of_config(model)
    else:
        modules, indexer = runner.model.modules(), None
        layers = [module for module in modules if isinstance(module, RadixAttention)]
    shape = shape_of_layers(layers, model.dtype, indexer)
    model.topkv_lowered = lowered_for(arguments, model, settings_of(arguments)[0], shape)


def make_backend(runner: Any) -> Any:
    """Make the coordinator of a model runner, and the attention backend of its layers.

    Raises:
        HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
    """
    from attrs import evolve

    from topkv_engines.report import report
    from topkv_engines.session import Session
    from topkv_sglang.backend import LatentAttnBackend, TopkvAttnBackend
    from topkv_sglang.ranks import host_file
    from topkv_sglang.requests import ScheduledRequests

    rows = runner.req_to_token_pool

    def names() -> list[Any]:
        return [*session.requests.tokens] if session.requests else []

    session = Session(names, lambda coordinator: ScheduledRequests(coordinator, rows))
    with host_file(runner.model_config) as file:
        session.allocate(evolve(runner.model_config.topkv_lowered, host_file=file))
    if session.coordinator.config.device.type == "cuda":
        session.warm_up()  # graphs are recorded next
    runner.topkv_session = session
    report(session.coordinator.config)
    return (LatentAttnBackend if runner.use_mla_backend else TopkvAttnBackend)(session)


def init_new(original: Hook, kind: type, batch: Any, *more: Any, **named: Any) -> Any:
    """Note what the scheduler knows of a step on the host, of which SGLang drops some."""
    made = original(kind, batch, *more, **named)
    if used() and not batch.forward_mode.is_idle():
        from topkv_sglang.requests import Step

        made.topkv_step = Step.of(batch)
    return made


def forward(original: Hook, runner: Any, batch: Any, *more: Any, **named: Any) -> Any:
    """Run a step between the begin and the end of the coordinator's forward."""
    session, step = session_of(runner), getattr(batch, "topkv_step", None)
    if session is None or step is None:
        return original(runner, batch, *more, **named)
    return session.run(step, lambda _: original(runner, batch, *more, **named))


def validate_beams(original: Hook, coordinator: Any, *request: Any, **named: Any) -> Any:
    """Refuse a request for beams, whose rows are copies of each other."""
    if used():
        return "beam search is not supported by the attention backend topkv"
    return original(coordinator, *request, **named)


def process_batch_result(original: Hook, scheduler: Any, *more: Any, **named: Any) -> Any:
    """Show counts behind a step, once a second at most."""
    result = original(scheduler, *more, **named)
    if (session := session_of(scheduler.tp_worker.model_runner)) is not None:
        _show(scheduler, session)
    return result


def on_idle(original: Hook, scheduler: Any) -> None:
    """End requests whose rows were given back: no forward comes that would."""
    session = session_of(scheduler.tp_worker.model_runner)
    if session is not None and session.requests.rows.ended:
        session.requests.abort()  # padding that a dummy run has left
        session.requests.release()
        _show(scheduler, session)
    original(scheduler)


def _show(scheduler: Any, session: Any) -> None:
    collector = scheduler.metrics_collector if scheduler.metrics_reporter.enable_metrics else None
    if collector is None:
        return
    if not hasattr(collector, "topkv"):
        from topkv_sglang.metrics import Metrics

        collector.topkv = Metrics(collector.labels)
    collector.topkv.show(session.counts.take())


def get_internal_state(original: Hook, controller: Any, *more: Any, **named: Any) -> Any:
    """Report counts with the state of a scheduler, under ``topkv``."""
    output = original(controller, *more, **named)
    session = session_of(controller.scheduler.tp_worker.model_runner)
    if session is not None:
        from topkv_sglang.metrics import state

        output.internal_state["topkv"] = state(session)
    return output


def release_host_resources(original: Hook, scheduler: Any) -> None:
    """Give back the host memory too."""
    original(scheduler)
    if (session := session_of(scheduler.tp_worker.model_runner)) is not None:
        session.close()


def session_of(runner: Any) -> Any:
    """Return the session of a model runner; None where topkv does not serve."""
    return getattr(runner, "topkv_session", None)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."

HOOKS: dict[str, Hook] = {
    "sglang.srt.arg_groups.validation_hook.check_server_args": check_arguments,
    "sglang.srt.arg_groups.attention_hook.handle_attention_backend_compatibility": (
        resolve_attention
    ),
    "sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned": plan_pool_growth,
    "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default": resolve_indexer,
    "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution": resolve_indexer,
    "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init": validate_beams,
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": init_new,
    f"{_RUNNER}load_model": load_model,
    f"{_RUNNER}forward": forward,
    f"{_SCHEDULER}process_batch_result": process_batch_result,
    f"{_SCHEDULER}on_idle": on_idle,
    f"{_SCHEDULER}release_host_resources": release_host_resources,
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController."
    "get_internal_state": get_internal_state,
    **PLACE_HOOKS,
}
"""Hooks by the function that each stands around."""
