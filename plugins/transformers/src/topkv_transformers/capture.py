"""Decode steps of a model, recorded once and replayed: a CUDA graph for each number of rows, and
of tokens that each appends: one, or more where drafts are verified.

A step of a decoder is hundreds of launches, and on a GPU Python takes longer to issue them than
the GPU to run them. All that a step reads is at fixed addresses, ids and positions here,
lengths, slots and pages in the coordinator; so one recording serves every cache and every call.

``CapturedDecoder`` stands in for ``decoder.forward`` while a model is attached. Hooks on the
decoder, the head, and all that ``generate`` does around them run as before.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from attrs import define, field
from torch import Tensor

from topkv.config import LoweredConfig
from topkv_transformers.cache import TopkvCache
from topkv_transformers.compiled import CompiledLayers
from topkv_transformers.names import CACHE
from topkv_transformers.recorded_stock import FixedStock, are_steady
from topkv_transformers.requests import CacheRequests
from topkv_transformers.watch import ModelState

Shape = tuple[int, int]
"""Rows of a step, and the tokens that each appends."""

Recorder = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Records what a body launches without running it, and returns what launches it."""

SERVED = {"input_ids", "attention_mask", "position_ids", CACHE, "use_cache"}
"""Arguments of a decoder that a recording knows; the mask is known to the cache."""

COLLECTED = ("output_hidden_states", "output_router_logits", "output_attentions")
"""Settings by which a decoder returns more than its last hidden state."""

_RECORDING = RLock()
"""Held while a step is recorded, for no other thread may then empty the cache of torch."""

DYNAMIC_ROPE = ("dynamic", "longrope")
"""Kinds of RoPE that ask the device for the largest position."""


@define
class CaptureReport:
    """Report of the decode steps that an attached model has captured.

    Attributes:
        off: every reason why no step is captured; empty where steps are.
        graph_bytes: device memory that recordings took, by shape of the step, as all below.
        seconds: time that recording took.
        replayed: steps that were replayed, of all shapes.
        eager: why steps are issued by Python.
        compiled: time of the first step, which compiles the layers.
        uncompiled: why layers run as they are although they were to be compiled.
    """

    off: list[str] = field(factory=list)
    graph_bytes: dict[Shape, int] = field(factory=dict)
    seconds: dict[Shape, float] = field(factory=dict)
    replayed: int = 0
    eager: dict[Shape, str] = field(factory=dict)
    compiled: dict[Shape, float] = field(factory=dict)
    uncompiled: dict[Shape, str] = field(factory=dict)

    def __str__(self) -> str:
        if self.off:
            return f"off: {'; '.join(self.off)}"
        reported = [f"{self.replayed} steps replayed"]
        reported += [
            f"{_named(shape)} compiled in {took:.1f} s" for shape, took in self.compiled.items()
        ]
        reported += [f"{_named(shape)} not compiled: {w}" for shape, w in self.uncompiled.items()]
        for shape, seconds in self.seconds.items():
            size = self.graph_bytes[shape] / 2**20
            reported.append(f"{_named(shape)} recorded in {seconds:.2f} s and {size:.0f} MiB")
        return "; ".join(
            [*reported, *(f"{_named(shape)} not: {why}" for shape, why in self.eager.items())]
        )


def _named(shape: Shape) -> str:
    rows, tokens = shape
    return f"{rows} rows" if tokens == 1 else f"{rows} rows of {tokens} tokens"


def refusals(decoder: Any, config: LoweredConfig) -> list[str]:
    """Every reason why steps of a decoder are not captured."""
    reasons = []
    if config.capture == "off":
        reasons.append("the setting capture is 'off'")
    if config.device.type != "cuda":
        reasons.append(f"the model is on {config.device}, which has no CUDA graphs")
    if not config.capturable:
        reasons.append("a plugin states that its decode methods cannot be captured")
    rope = getattr(getattr(decoder, "rotary_emb", None), "rope_type", None)
    if rope in DYNAMIC_ROPE:
        reasons.append(f"RoPE of type {rope!r} waits for the device")
    return reasons


class CudaRecorder:
    """Records CUDA graphs that share the memory of what is needed within a step alone.

    They may, because the output of one is copied before another is replayed.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._failed: dict[Any, torch.cuda.CUDAGraph] = {}
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, body: Callable[[], Any]) -> Callable[[], Any]:
        """See ``Recorder``."""
        # The memory goes with the last graph that used it, and must not be named after that.
        pools = (graph.pool() for graph in self._graphs)
        pool = next((each for each in pools if each not in self._failed), None)
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        # Torch would take one stream for all models, on the device that was current at first.
        self._stream = self._stream or torch.cuda.Stream()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Other threads may use the device meanwhile.
        record = torch.cuda.graph(graph, pool, self._stream, "thread_local")
        try:
            # A capture that cannot end leaves its stream the current one.
            with torch.cuda.stream(before), record:
                body()
        except BaseException:
            # Pinned memory stays recorded to that pool, by a filter that points to the graph.
            self._failed[pool] = graph
            with suppress(RuntimeError):  # and, before torch 2.13, the allocator recording
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise
        self._graphs.add(graph)
        return graph.replay


class Step:
    """A decode step of B rows of Q tokens: its inputs at fixed addresses, and its recording.

    Args:
        shape: B and Q.
        device: of the model.
        layers: the decoder's, compiled; None to run them as they are.
        stock: what layers hold that topkv leaves alone.

    Attributes:
        ids, positions: int64 ``[B, Q]``.
        output: what the decoder returned when it last ran; a replay fills its hidden state.
        replay: launches the recording; None until there is one.
    """

    def __init__(
        self, shape: Shape, device: torch.device, layers: CompiledLayers | None, stock: FixedStock
    ) -> None:
        self.shape, self.layers, self.stock = shape, layers, stock
        self.ids, self.positions = torch.zeros((2, *shape), dtype=torch.long, device=device)
        self.output: Any = None
        self.replay: Callable[[], Any] | None = None


class CapturedDecoder:
    """The ``forward`` of a decoder while its model is attached; replays what it can.

    The first step of each shape runs in Python, so that kernels are compiled and libraries set up;
    the second is recorded, which runs nothing, and replayed, as are all further ones. Recordings
    are dropped when the decoder's modules have changed.

    Args:
        decoder: the decoder.
        requests: of the model's caches.
        recorder: what records.
        report: where recordings are reported.
        compiles: whether layers are compiled in what is recorded, by the first step.
    """

    def __init__(
        self,
        decoder: Any,
        requests: CacheRequests,
        recorder: Recorder,
        report: CaptureReport,
        compiles: bool = False,
    ) -> None:
        self.decoder, self.requests, self.compiles = decoder, requests, compiles
        self.recorder, self.report = recorder, report
        self.original = decoder.forward
        self._replaced = decoder.__dict__.get("forward")
        self._stand_in = TopkvCache(requests, requests.stand_in)
        self._steps: dict[Any, Step] = {}
        self._model: ModelState | None = None
        decoder.forward = self

    def remove(self) -> None:
        """Give the decoder its own ``forward`` back, and drop the recordings."""
        del self.decoder.__dict__["forward"]
        if self._replaced is not None:
            self.decoder.forward = self._replaced
        self._steps.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the decoder's ``forward``."""
        if args or not self._serves(kwargs):
            # Another thread's call may outlast the forward, and nobody would name its own again.
            if self.requests.forward is not None and self.requests.turn.mine:
                self.requests.attention.name_ours()
            return self.original(*args, **kwargs)
        cache = kwargs[CACHE]
        # What was made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            step = self._step(kwargs["input_ids"], kwargs.get("position_ids"), cache.state.seen)
            step.stock.take(cache.state)
            hidden = self._run(step)
            step.stock.give(cache.state)
        return type(step.output)(last_hidden_state=hidden, **{CACHE: cache})

    def _serves(self, kwargs: Mapping[str, Any]) -> bool:
        """Return True for a plain decode step, all of whose arguments a recording knows."""
        forward, cache = self.requests.forward, kwargs.get(CACHE)
        if forward is None or forward.chunks is not None or torch.is_grad_enabled():
            return False
        if forward.model is None:
            return False
        if not isinstance(cache, TopkvCache) or cache.state is not forward.state:
            return False
        ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
        if ids is None or tuple(ids.shape) in self.report.eager:
            return False
        if positions is not None and positions.shape not in (ids.shape, (1, ids.shape[1])):
            return False
        # Some mixed models begin at 0 in each call that names no positions.
        if any(cache.state.stock) and (positions is None or not are_steady(cache.state)):
            return False
        rest = {name: value for name, value in kwargs.items() if name not in SERVED}
        if rest.pop("return_dict", True) is not True:
            return False
        if any(value is not None and value is not False for value in rest.values()):
            return False
        self._follow(forward.model)
        collects = any(getattr(self.decoder.config, name, False) for name in COLLECTED)
        return not (collects or forward.model.walk.hooked)

    def _follow(self, model: ModelState) -> None:
        """Drop the recordings if they are of another model than this one."""
        if model is self._model:
            return
        if self._model is None or not model.walk.records_as(self._model.walk):
            self._steps.clear()
            self.report.eager.clear()
            self.report.uncompiled.clear()
        self._model = model

    def _step(self, ids: Tensor, positions: Tensor | None, seen: int) -> Step:
        """The step of these rows, with its inputs in place."""
        # Transformers chooses other experts for decoding than for direct calls.
        shape: Shape = (ids.shape[0], ids.shape[1])
        key = shape, getattr(self.decoder.config, "_experts_implementation", None)
        step = self._steps.get(key)
        if step is None:
            layers = CompiledLayers(self.decoder, self._stand_in) if self.compiles else None
            stock = FixedStock(self.requests.stand_in.stock)
            step = self._steps[key] = Step(shape, ids.device, layers, stock)
        step.ids.copy_(ids)
        if positions is not None:
            step.positions.copy_(positions)
        elif shape[1] == 1:
            step.positions.fill_(seen)
        else:
            torch.arange(seen, seen + shape[1], out=step.positions[0])
            step.positions[1:] = step.positions[0]
        return step

    def _run(self, step: Step) -> Tensor:
        """Run a step as far as it has come. Returns the hidden state ``[B, Q, hidden]``."""
        if step.output is not None and step.replay is None:
            self._record(step)
        if step.layers and step.output is None:
            hidden = self._compile(step)
        elif step.replay is None:  # it is the first step, or cannot be recorded
            hidden = self._body(step)
        else:
            step.replay()
            self.report.replayed += 1
            hidden = step.output.last_hidden_state.clone()  # the next step overwrites it
        forward = self.requests.opened(self.requests.stand_in)
        forward.offloaded = True
        return hidden

    def _body(self, step: Step) -> Tensor:
        self.requests.attention.name_ours(sees_all=True)
        step.stock.begin(self.requests.opened(self.requests.stand_in).state)
        with step.layers.installed() if step.layers else nullcontext():
            step.output = self.original(
                input_ids=step.ids,
                attention_mask=None,
                position_ids=step.positions,
                use_cache=True,
                **{CACHE: self._stand_in},
            )
        step.stock.end()
        self.requests.coordinator.offload()
        hidden: Tensor = step.output.last_hidden_state
        return hidden

    def _compile(self, step: Step) -> Tensor:
        """Run a step for the first time, which compiles its layers. If they cannot be, that is
        noted, and the forward begun again without."""
        began, shape = time.perf_counter(), step.shape
        try:
            hidden = self._body(step)
        except Exception as error:
            what = f"the layers cannot be compiled for a decode step of {_named(shape)}"
            self.report.uncompiled[shape] = _warn(f"{what} and run as they are", error)
            step.layers = None
            self.requests.reopen()
            return self._body(step)
        self.report.compiled[shape] = time.perf_counter() - began
        return hidden

    def _record(self, step: Step) -> None:
        """Record a step. One that cannot be is noted, and its forward begun again."""
        shape, device, began = step.shape, step.ids.device, time.perf_counter()
        try:
            with _RECORDING:
                before = _free_bytes(device)
                step.replay = self.recorder(lambda: self._body(step))
                self.report.graph_bytes[shape] = before - _free_bytes(device)
        except Exception as error:
            step.replay = None
            what = f"a decode step of {_named(shape)} cannot be captured and is issued by Python"
            self.report.eager[shape] = _warn(f"{what} from now on", error)
            self.requests.reopen()
            return
        self.report.seconds[shape] = time.perf_counter() - began


def _warn(what: str, error: Exception) -> str:
    """Say what is slower from now on, and return why."""
    why = f"{type(error).__name__}: {error}"
    warnings.warn(f"{what}, which is slower: {why}", RuntimeWarning, stacklevel=3)
    return why


def _free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that are free, or would be but for torch; 0 of other devices."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()  # recording does so too, and its gain is not the graph's
    return torch.cuda.mem_get_info(device)[0]
