"""Predicts a step of an attached model, from what the model and its coordinator are."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from topkv import SparseCoordinator
from topkv.errors import OutOfMemory, is_out_of_memory
from topkv_prediction.machine import Machine
from topkv_prediction.probe import rates
from topkv_prediction.report import ACCEPT, Prediction, check, predict
from topkv_prediction.step import StepModel

logger = logging.getLogger("topkv.prediction")


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of the weights that a step reads: all but an embedding that is no head as well.

    Experts count as if all were read, which few rows do not do.
    """
    size = sum(each.nbytes for each in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return size if tied else size - embedding.weight.nbytes


def prediction(
    model: PreTrainedModel,
    coordinator: SparseCoordinator,
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
    """See ``AttachedModel.prediction``."""
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
    model_ms = machine.model_ms(weights_read(model), config.model.num_layers)
    return predict(
        StepModel(coordinator.manager, machine, model_ms),
        config.max_request_tokens if context is None else context,
        config.max_requests if requests is None else requests,
        hit_rate,
        memory,
        queries,
        accept,
    )


def report(handle: Any) -> None:
    """Log how long a step will take, if the logger listens, on a GPU, which can be measured.

    Args:
        handle: an ``AttachedModel``.
    """
    if not logger.isEnabledFor(logging.INFO) or handle.config.device.type != "cuda":
        return
    try:
        reported = str(handle.prediction())
    except Exception as error:
        if not (isinstance(error, OutOfMemory) or is_out_of_memory(error)):
            raise
        reported = f"no step is predicted, for there is no room to measure the GPU: {error}"
    if handle.capture.off:
        why = "; ".join(handle.capture.off)
        reported += f"\nsteps are not captured ({why}), so both take longer than this"
    logger.info("%s", reported)
