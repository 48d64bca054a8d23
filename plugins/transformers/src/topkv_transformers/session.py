"""The handle of an attached model: what is put into the model, and taken out again."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn
from transformers import PreTrainedModel

from topkv import SparseCoordinator
from topkv.errors import CapabilityError, RequestError
from topkv.hooks.observer import Occupancy, TransferReport
from topkv.report import MemoryReport, count_occupancy
from topkv_prediction.report import ACCEPT, Prediction
from topkv_prediction.running import predict_running
from topkv_prefixes.stored import StoredSession
from topkv_transformers import attention, blocks, capture, sessions
from topkv_transformers.cache import TopkvCache
from topkv_transformers.generation import generate
from topkv_transformers.inputs import PreparedInputs
from topkv_transformers.latent import LatentAttention, install
from topkv_transformers.names import HANDLE, cache_in
from topkv_transformers.prediction import weights_read
from topkv_transformers.prefixes import PromptPrefixes
from topkv_transformers.requests import CacheRequests
from topkv_transformers.stock import FreshLayers
from topkv_transformers.support import attention_modules, decoder_of, left_alone
from topkv_transformers.watch import ModelWatch


@frozen
class Stats:
    """Counts of a coordinator so far, and its occupancy.

    Attributes:
        transfers: counts of all requests since it was made, ended ones included, all together
            and by layer.
        occupancy: pages and slots that are held now.
    """

    transfers: TransferReport
    occupancy: Occupancy


class AttachedModel:
    """A model that decodes through topkv until ``detach``; also a context manager.

    Forwards over a ``TopkvCache`` go through the coordinator, and ``generate`` makes such a cache
    unless it is given one. Forwards over any other cache, or none, run as before.

    Args:
        model: a model that ``support.refusals`` has passed.
        coordinator: made for this model alone.

    Attributes:
        model: the model.
        coordinator: the coordinator.
        config: its lowered configuration.
        shape: geometry of the attention layers.
        requests: the requests of its caches, and the open forward.
        capture: what was captured of decode steps, or why nothing is.
        prefixes: what prompts of ``generate`` take over from earlier ones.
    """

    def __init__(self, model: PreTrainedModel, coordinator: SparseCoordinator) -> None:
        self.model = model
        self.coordinator = coordinator
        self.config = coordinator.config
        self.shape = coordinator.model
        self._decoder = decoder_of(model)
        self.requests = CacheRequests(
            coordinator,
            attention.NamedAttention(self._decoder, left_alone(model)),
            ModelWatch(model, self._decoder),
            FreshLayers(self._decoder.config),
        )
        self.prefixes = PromptPrefixes(self._decoder, self.requests)
        self._parameters = list(inspect.signature(self._decoder.forward).parameters)
        self._generate = model.__dict__.get("generate")
        attention.register()
        self._install()

    def _install(self) -> None:
        self._instead: list[LatentAttention | blocks.BlockIndex | PreparedInputs] = []
        if self.shape.attention == "mla":
            self._instead += install(attention_modules(self.model))
        elif self.shape.indexer is not None:
            self._instead += blocks.install(attention_modules(self.model))
        self._instead.append(PreparedInputs(self.model))
        decoder, original = self._decoder, self.model.generate
        self.capture = capture.CaptureReport(capture.refusals(decoder, self.config))
        self._captured: capture.CapturedDecoder | None = None
        if not self.capture.off:
            recorder = capture.CudaRecorder()
            self._captured = capture.CapturedDecoder(
                decoder, self.requests, recorder, self.capture, self.config.compile
            )
        self._hooks = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

        @wraps(original)
        def generate_through_topkv(*args: Any, **kwargs: Any) -> Any:
            return generate(self.model, self.requests, self.prefixes, original, args, kwargs)

        self.model.generate = generate_through_topkv
        setattr(decoder, HANDLE, self)

    # For users.

    @property
    def attached(self) -> bool:
        """False after ``detach``."""
        return self.requests.attached

    def new_cache(self) -> TopkvCache:
        """An empty cache, for several calls of ``generate`` or direct calls of the model.

        Its requests begin with the first forward and end with ``close``, or when nobody holds
        the cache any more. Pages that a call reserved and did not fill stay with them.
        """
        self.requests.check_attached()
        return TopkvCache(self.requests)

    def suspend(self, cache: TopkvCache, where: StoredSession) -> None:
        """Write a cache to a session of ``topkv_prefixes.stored``, and close it; see
        ``sessions.suspend``, for errors too."""
        self.requests.check_attached()
        cache.check_owner(self.requests)
        sessions.suspend(cache, where)

    def resume(self, where: StoredSession) -> TopkvCache:
        """Return a cache of what ``suspend`` wrote, in this process or another one. Pass it to
        ``generate`` with all ids so far. See ``sessions.resume``, for errors too."""
        self.requests.check_attached()
        return sessions.resume(self.requests, where)

    def abandon(self) -> None:
        """Drop the open forward, if there is one, after any exception."""
        self.requests.abandon()

    def memory(self) -> MemoryReport:
        """Bytes on both tiers. ``left`` is what the stock layers of all caches hold now."""
        return evolve(self.coordinator.memory(), left=self.requests.stock_bytes)

    def stats(self) -> Stats:
        """Hits, misses and bytes by layer of all requests so far, and the pages and slots that
        are held now, see ``Stats``. Waits for the device."""
        occupancy = count_occupancy(self.coordinator.requests)
        return Stats(self.coordinator.transfers_of(), occupancy)

    def prediction(
        self,
        context: int | None = None,
        requests: int | None = None,
        *,
        hit_rate: float | None = None,
        link: float | None = None,
        bandwidth: float | None = None,
        memory: int | None = None,
        queries: int = 1,
        accept: float = ACCEPT,
    ) -> Prediction:
        """Predict the time of a captured step, beside one over a cache that stays on the GPU.

        The prediction, which prints as text, also has how many requests fit either way, and from
        where on topkv is faster.

        Args:
            context: tokens of each request; ``max_request_tokens`` by default.
            requests: that decode together; ``max_requests`` by default.
            hit_rate: share of the units that a step selects that need no load; by default what
                was counted so far, in steps of any number of tokens. Before anything was, 0.85 for
                one token, and for several as many misses for each.
            link: GB/s at which kernels read host memory. Measured by default, as below, which
                takes a part of a second.
            bandwidth: GB/s at which kernels read device memory.
            memory: bytes on the device for caches; by default what is free on the GPU and what
                topkv holds there, and unknown on a CPU.
            queries: tokens of each request that a step verifies: one, and drafts.
            accept: share of the drafts that are accepted.

        Raises:
            ConfigError: with every argument that makes no sense.
            CapabilityError: there is no GPU to measure, and not both rates are given.
        """
        return predict_running(
            self.coordinator,
            weights_read(self.model),
            context,
            requests,
            hit_rate=hit_rate,
            link=link,
            bandwidth=bandwidth,
            memory=memory,
            queries=queries,
            accept=accept,
        )

    def detach(self) -> None:
        """End all requests, free both tiers and leave the model as it was. Idempotent."""
        if not self.attached:
            return
        with self.requests.exclusive():
            # Whatever happened, the config names what it named before.
            self.requests.attention.restore()
            for hook in self._hooks:
                hook.remove()
            if self._captured:
                self._captured.remove()
            for each in self._instead:
                each.remove()
            if self._generate is None:
                del self.model.__dict__["generate"]
            else:
                self.model.generate = self._generate
            delattr(self._decoder, HANDLE)
            self.requests.close()

    def __enter__(self) -> AttachedModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    __reduce_ex__ = CacheRequests.__reduce_ex__

    # The two hooks on the decoder.

    def _before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.requests.exclusive():
            call = self._call(args, kwargs)
            cache = cache_in(call)
            if not isinstance(cache, TopkvCache):
                return
            cache.check_owner(self.requests)
            self._check_mode(call)
            inputs = call.get("input_ids")
            inputs = call.get("inputs_embeds") if inputs is None else inputs
            if inputs is None:
                raise RequestError("neither input_ids nor inputs_embeds was given")
            rows, columns = inputs.shape[:2]
            self.requests.open(cache.state, rows, columns, call.get("attention_mask"))
            if self._captured is None:  # else it does so where it replays nothing
                self.requests.attention.name_ours()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the decoder by name."""
        return {**dict(zip(self._parameters, args, strict=False)), **kwargs}

    def _after(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Close the forward; ``output`` is None after an exception."""
        completed = output is not None
        if self.requests.end_forward(completed):
            return
        if completed and isinstance(cache_in(self._call(args, kwargs)), TopkvCache):
            raise RequestError(
                "this forward was dropped before its end, because the model or its handle was "
                "used within it, in a hook say; its tokens were not appended"
            )

    def _check_mode(self, call: dict[str, Any]) -> None:
        reasons = []
        config = self._decoder.config
        if call.get("output_attentions") or config.output_attentions:
            reasons.append("output_attentions: attention weights are never made")
        if call.get("use_cache") is False:
            reasons.append("use_cache=False contradicts the cache; leave it out")
        if self._decoder.training and (
            torch.is_grad_enabled() or getattr(config, "attention_dropout", 0.0)
        ):
            reasons.append("training is not supported; call model.eval() and use torch.no_grad()")
        device = self.config.device.type
        if torch.is_autocast_enabled(device):
            reasons.append(
                f"autocast is on for {device}: keys and queries would not have the dtype that the "
                "cache was made for; leave it, and convert the model before it is attached"
            )
        if reasons:
            raise CapabilityError("this forward cannot run through topkv", reasons)
