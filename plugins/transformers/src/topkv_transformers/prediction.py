"""Predicts a step of an attached model, from what the model and its coordinator are."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from topkv_prediction import running


def weights_read(model: PreTrainedModel) -> int:
    """Bytes of the weights that a step reads: all but an embedding that is no head as well.

    Experts count as if all were read, which few rows do not do.
    """
    size = sum(each.nbytes for each in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return size if tied else size - embedding.weight.nbytes


def report(handle: Any) -> None:
    """Log how long a step will take, see ``topkv_prediction.running.report``.

    Args:
        handle: an ``AttachedModel``.
    """
    note = ""
    if handle.capture.off:
        why = "; ".join(handle.capture.off)
        note = f"steps are not captured ({why}), so both take longer than this"
    running.report(handle.config.device, handle.prediction, note)
