"""The backend in torch, and what it checks when it is made; ``kernel_backend`` runs kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv.hooks.backend import BackendSetup
from topkv.ops.chunk_attention import kept
from topkv.types import LayerView, ModelShape, Plan, Tables
from topkv_authoring.page_table import adapt_page_table
from topkv_triton_attention import mla_reference, reference
from topkv_triton_attention.mla_reference import latent_refusals
from topkv_triton_attention.skip_reference import SkippingAttend

HEAD_DIMS = (64, 96, 128, 256)
"""Head dims of grouped-query attention; ``MAX_GROUP`` is its largest group. For latent rows see
``mla_reference``."""
MAX_GROUP = 16
MAX_UNIT = 128
MAX_QUERIES = 8
MAX_QUERY_HEADS = 64
"""Query heads of a kv-head, of all queries of a row, that a program attends with."""

SKIP = "skip_softmax"
"""Name of the option that this backend has; for its factor see ``skip_reference``."""

Calls = tuple[Callable[..., None], Callable[..., None]]


class TritonAttention:
    """Attention over units that are scattered in a buffer, for one group of layers, in torch.

    Args:
        setup: grouped-query or latent attention; scratch is made for ``max_batch`` rows.

    Raises:
        CapabilityError: with every reason why this model, group or device cannot be served.
    """

    impl = "reference"

    def __init__(self, setup: BackendSetup) -> None:
        reasons = self._refusals(setup)
        if reasons:
            raise CapabilityError(
                f"triton_attention cannot serve layers {list(setup.group.layers)}", reasons
            )
        self._attend, self._prefill = self._made(setup)
        self._adapt = adapt_page_table if skip_factor(setup) is None else _adapt_with_lengths

    def _refusals(self, setup: BackendSetup) -> list[str]:
        return refusals(setup)

    def _made(self, setup: BackendSetup) -> Calls:
        """Make the objects that ``attend`` and the hooks of prompts call."""
        model, most = setup.model, setup.max_batch
        prefill = reference.Prefill(model.scale, model.softcap)
        if is_latent(model):
            shape = mla_reference.LatentShape.of(model, setup.group)
            return mla_reference.Attend(shape, model.scale, most, setup.max_queries), prefill
        sizes = (model.scale, most, model.softcap, setup.max_queries)
        factor = skip_factor(setup)
        if factor is not None:
            return SkippingAttend(*sizes, factor=factor), prefill
        return reference.Attend(*sizes), prefill

    @hookimpl
    def adapt_page_table(self, layer: LayerView, plan: Plan, tables: Tables) -> None:
        """See ``topkv.hooks.backend.Backend.adapt_page_table``."""
        self._adapt(layer, plan, tables, self.impl)

    @hookimpl
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """See ``topkv.hooks.backend.Backend.attend``.

        Raises:
            CapabilityError: the dtype of q is not that of k and v, or more queries than
                ``max_queries`` allows.
            ValueError: more rows than ``max_batch`` allows.
        """
        self._attend(q, k, v, tables, out, lse)

    @hookimpl
    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See ``topkv.hooks.backend.Backend.prefill``."""
        self._prefill(q, k, v, q_start, k_start, out, lse)

    @hookimpl
    def prefill_selected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        ids: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See ``topkv.hooks.backend.Backend.prefill_selected``."""
        self._prefill(q, k, v, q_start, k_start, out, lse, kept(ids, len(k)))


def _adapt_with_lengths(layer: LayerView, plan: Plan, tables: Tables, impl: str) -> None:
    """Adapt the page table, and attach the lengths of the rows' requests to it."""
    adapt_page_table(layer, plan, tables, impl)
    tables.attached = layer.step.lengths


def skip_factor(setup: BackendSetup) -> float | None:
    """The factor of the option ``skip_softmax``; None where it is not asked for."""
    asked = setup.options.get(SKIP)
    return None if asked is None else float(asked.factor)


def is_latent(model: ModelShape) -> bool:
    """Return True if rows are latent ones."""
    return model.attention == "mla"


def refusals(setup: BackendSetup) -> list[str]:
    """Return the reasons why a group cannot be served, on whatever device."""
    model, group = setup.model, setup.group
    reasons = latent_refusals(model, group) if is_latent(model) else _head_refusals(setup)
    if is_latent(model) and model.softcap is not None:
        reasons.append(f"softcap: logits of latent attention are not capped, got {model.softcap}")
    if is_latent(model) and SKIP in setup.options:
        reasons.append(f"{SKIP}: blocks of latent rows are not skipped; leave the stage out")
    if model.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        reasons.append(
            f"dtype: expected float16, bfloat16 or float32, got {model.dtype}; "
            "load the model in one of those"
        )
    if not 1 <= group.unit <= MAX_UNIT or group.unit & (group.unit - 1):
        reasons.append(
            f"unit: expected a power of two up to {MAX_UNIT}, got {group.unit}; "
            "set unit (or, for dense layers, page_tokens) to one"
        )
    if group.max_lanes * group.slots >= 2**31:
        reasons.append(
            f"buffer: {group.max_lanes} lanes x {group.slots} slots exceed the int32 ids of a "
            "page table; lower max_requests or buffer"
        )
    most = _most_queries(setup)
    if not 1 <= setup.max_queries <= most:
        reasons.append(
            f"queries of a row: expected 1 to {most} with {setup.group_size} query heads a "
            f"kv-head, got {setup.max_queries}; draft fewer tokens"
        )
    if setup.max_batch < 1:
        reasons.append(f"max_batch: expected at least 1, got {setup.max_batch}; raise it")
    return reasons


def _most_queries(setup: BackendSetup) -> int:
    """Most queries of a row: heads of latent rows are cut into blocks, grouped ones are not."""
    if is_latent(setup.model):
        return MAX_QUERIES
    return min(MAX_QUERIES, MAX_QUERY_HEADS // max(setup.group_size, 1))


def _head_refusals(setup: BackendSetup) -> list[str]:
    reasons = []
    if setup.model.head_dim not in HEAD_DIMS:
        reasons.append(
            f"head dim: expected one of {HEAD_DIMS}, got {setup.model.head_dim}; use another "
            "backend"
        )
    if not 1 <= setup.group_size <= MAX_GROUP:
        reasons.append(
            f"query heads per kv-head: expected 1 to {MAX_GROUP}, got {setup.group_size}; "
            "use another backend"
        )
    return reasons
