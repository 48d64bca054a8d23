"""Predictions of a coordinator that is there, with the rates of its GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from topkv import SparseCoordinator
from topkv.errors import OutOfMemory, is_out_of_memory
from topkv_prediction.machine import Machine
from topkv_prediction.probe import rates
from topkv_prediction.report import ACCEPT, Prediction, check, predict
from topkv_prediction.step import StepModel

logger = logging.getLogger("topkv.prediction")


def predict_running(
    coordinator: SparseCoordinator,
    weights: int,
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
    """Predict steps of a coordinator.

    Args:
        coordinator: allocated.
        weights: bytes that a step reads beside keys and values.
        context, requests: as many as the configuration has room for by default.
        hit_rate: by default what was counted, or ``assumed_hits``.
        link, bandwidth: GB/s of the link and of device memory; measured by default, on a GPU,
            which waits for it.
        memory: bytes on the device for caches; by default what is free, with what is held.
        queries, accept: see ``predict``.

    Raises:
        ConfigError: with every reason why this cannot be asked.
        CapabilityError: rates are to be measured, and the device is no GPU.
    """
    given = {"hit_rate": hit_rate, "link": link, "bandwidth": bandwidth, "memory": memory}
    check(context=context, requests=requests, **given, queries=queries, accept=accept)
    config = coordinator.config
    if link is None or bandwidth is None:
        measured = rates(config.device)
        bandwidth = measured[0] if bandwidth is None else bandwidth
        link = measured[1] if link is None else link
    if hit_rate is None:
        counted = coordinator.transfers_of()
        hit_rate = counted.hit_rate if counted.hits + counted.misses else None
    if memory is None and config.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(config.device)
        # What torch keeps and nobody uses is free as well.
        free += torch.cuda.memory_reserved(config.device)
        free -= torch.cuda.memory_allocated(config.device)
        memory = free + coordinator.memory().device
    machine = Machine(memory=bandwidth, link=link)
    return predict(
        StepModel(
            coordinator.manager, machine, machine.model_ms(weights, config.model.num_layers)
        ),
        config.max_request_tokens if context is None else context,
        config.max_requests if requests is None else requests,
        hit_rate,
        memory,
        queries,
        accept,
    )


def report(device: torch.device, predicted: Callable[[], object], note: str = "") -> None:
    """Log how long a step will take, if the logger listens, on a GPU, which can be measured.

    Args:
        device: of the coordinator.
        predicted: makes the prediction; where there is no room to measure, that is reported.
        note: a further line.
    """
    if not logger.isEnabledFor(logging.INFO) or device.type != "cuda":
        return
    try:
        reported = str(predicted())
    except Exception as error:
        if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
            raise
        reported = f"no step is predicted, for there is no room to measure the GPU: {error}"
    logger.info("%s", f"{reported}\n{note}" if note else reported)
