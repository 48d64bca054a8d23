"""The attention backend that SGLang calls ``topkv``: every layer attends through the coordinator.

SGLang keeps no keys and values; its pool is a placeholder with the size of the host pool.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from torch import Tensor

from topkv.errors import CapabilityError
from topkv_engines.session import Session


class TopkvAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Opens the forward of a step, and attends its layers.

    Args:
        session: of the model runner.
    """

    needs_cpu_seq_lens = True

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self.rows = session, 0

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        """Open the coordinator's forward; see ``AttentionBackend``, here and below."""
        tokens = len(forward_batch.positions)
        self.rows = self.session.forward(forward_batch.batch_size, tokens)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Prepare nothing: what a graph reads is the coordinator's."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of rows that pad a graph; none reads it."""
        return 1

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Say that nothing of SGLang's pools is read once the forward is open."""
        return SharedReadEnds.PRE_REPLAY

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> Tensor:
        """Attend a layer, of a step that decodes or reads prompts."""
        return self._attend(q, k, v, layer, save_kv_cache, others)

    forward_extend = forward_decode

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, save: bool, others: dict[str, Any]
    ) -> Tensor:
        """Attend; rows of padding, behind those of requests, get 0.

        Raises:
            CapabilityError: the layer asks for more than attention to its own keys and values.
        """
        asked = [name for name, value in others.items() if value is not None]
        if asked or not save:
            wanted = ", ".join(asked) or "no keys and values to be kept"
            reason = f"layer {layer.layer_id} asks for {wanted}, which is not supported"
            raise CapabilityError("an attention layer of this model cannot be served", [reason])
        rows = self.rows
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        out[rows:].zero_()
        if rows:
            self._attend_rows(layer, q[:rows], k[:rows], v[:rows], out[:rows])
        return out.view(len(q), -1)

    def _attend_rows(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Attend the rows of requests."""
        self.session.attend(layer.layer_id, q, k, v, out)


class LatentAttnBackend(TopkvAttnBackend):
    """Attends layers of latent attention, whose values are a part of their keys."""

    def _attend_rows(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        index, layer.topkv_index = layer.topkv_index, None
        if index is not None:
            index = index.rows(slice(0, len(q)))
        self.session.attend(layer.layer_id, q, k, k, out, index)
