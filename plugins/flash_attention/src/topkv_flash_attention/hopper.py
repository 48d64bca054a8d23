"""FlashAttention-3, by its operator: upstream's build and vLLM's.

``flash_attn_3::fwd`` and ``_vllm_fa3_C::fwd`` differ in arguments that are not used here, so a
call is put together by the operator's own schema. Keys and values are pages ``[pages, page, Hkv,
D]`` of any strides but the last, so a unit is a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv.types import GroupShape, ModelShape

LATENT, ROPE = 512, 64
"""Elements of a latent row: first the latent part, then the rotated one."""
Result = tuple[Tensor, Tensor]

SETTLED: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k"),
            *("cu_seqlens_k_new", "seqused_q", "page_table", "kv_batch_idx", "leftpad_k"),
            *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale"),
            *("v_descale", "scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k"),
        )
    ),
    **dict.fromkeys(("window_size_left", "window_size_right"), -1),
    **dict.fromkeys(("is_causal", "is_rotary_interleaved"), False),
    **dict.fromkeys(("attention_chunk", "num_splits", "sm_margin", "cp_rank"), 0),
    "softcap": 0.0,
    "cp_world_size": 1,
}
"""Values of the operator's arguments unless a call gives others."""

GIVEN = ("q", "k", "v", "seqused_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
NEEDED = (
    *(*GIVEN, "q_v", "out", "page_table", "leftpad_k", "is_causal", "num_splits", "softcap"),
    *("cu_seqlens_q", "seqused_q"),
)


@frozen
class Query:
    """Queries: ``main`` meets the keys; of latent attention ``latent`` meets the values too."""

    main: Tensor
    latent: Tensor | None = None


@frozen
class Counts:
    """Numbers of queries, where lanes have several.

    Attributes:
        queries: int32 ``[N]``, those of each lane that are no padding.
        starts: int32 ``[N + 1]``, ``0, Q, 2 * Q, ..``: where the queries of each lane begin.
    """

    queries: Tensor
    starts: Tensor


@frozen
class FlashAttention3:
    """FlashAttention-3 (``hopper/``). ``seqused_k`` is always given: vLLM's build demands it.

    Attributes:
        name: where it comes from, and its version where that is known.
        op: the operator ``fwd``.
        arguments: its arguments in order.
        settled: values of those that calls may leave out.
    """

    name: str
    op: Callable[..., Any]
    arguments: tuple[str, ...]
    settled: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, op: Any) -> FlashAttention3:
        """The library behind an overload.

        Raises:
            ValueError: its schema lacks an argument, or has an unknown one without default.
        """
        arguments = {argument.name: argument for argument in op._schema.arguments}
        lacking = [f"no argument {each}" for each in NEEDED if each not in arguments]
        lacking += [
            f"an argument {each} that is unknown here"
            for each, argument in arguments.items()
            if each not in (*GIVEN, *SETTLED) and not argument.has_default_value()
        ]
        if lacking:
            raise ValueError(f"its operator fwd has {', '.join(lacking)}")
        defaults = {n: a.default_value for n, a in arguments.items() if a.has_default_value()}
        return cls(name, op, tuple(arguments), {**defaults, **SETTLED})

    def call(self, **given: Any) -> Any:
        """Call the operator by names of arguments."""
        values = {**self.settled, **given}
        return self.op(*[values[name] for name in self.arguments])

    def refusals(
        self, model: ModelShape, group: GroupShape, capability: tuple[int, int] | None
    ) -> list[str]:
        """Reasons why it cannot serve a group on a device of this capability, if there is one."""
        reasons = []
        if capability is not None and capability[0] != 9:
            reasons.append(f"it is for capability 9.0, got {capability[0]}.{capability[1]}")
        if model.attention != "mla" and (model.head_dim % 8 or model.head_dim > 256):
            reasons.append(f"head dims are multiples of 8 up to 256, got {model.head_dim}")
        if model.attention == "mla" and (model.head_dim, model.out_dim) != (LATENT + ROPE, LATENT):
            reasons.append(
                f"of latent attention it takes rows of {LATENT} + {ROPE} elements, got head_dim "
                f"{model.head_dim} with values of {model.out_dim}"
            )
        return reasons

    def attend(
        self,
        q: Query,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        softcap: float,
        splits: int,
        zeros: Tensor,
        out: Tensor,
        counts: Counts | None = None,
    ) -> Result:
        """Decode attention: keys, values and tables as in the hook.

        The causal mask is aligned to the bottom right corner: the last of a lane's queries sees
        its last token. Where a lane has several queries they are a packed sequence with room for
        Q, of which the library is handed how many there are. It takes that of a batch of lanes,
        ``[N, Q, ..]``, too, but would then merge the parts of lane 0 for all of them.

        Args:
            q: parts of ``[N, Q, heads of a lane, D]``, lanes at any stride, and tokens of all
                lanes at one stride where Q is larger than 1.
            softcap: see ``ModelShape.softcap``; 0 for plain logits, as in ``chunk``.
            splits: most parts that the tokens of a lane are cut into; 0 leaves it to the library.
            zeros: int32 ``[N]`` of 0.
            out: ``[N, Q, heads, Dv]`` to write to, where the library can; at such strides too.
            counts: of the queries; None where Q is 1.

        Returns:
            ``[N, Q, heads, Dv]``, ``out`` itself where it can, and the fp32 ``[N, Q, heads]``
            natural log-sum-exp. Of queries that see no token, and of padding, both are anything.
        """
        lanes, queries, heads, _ = q.main.shape
        unit, group = k.shape[2], queries * heads // k.shape[1]
        # Pages of a multiple of 64 tokens, or of 80 under a causal mask, would come by TMA where
        # more than 64 rows share them. TMA brings what is behind the length as well, and 0 times
        # NaN is NaN. An operator that is given left padding, of 0 here, copies row by row and
        # fills with 0.
        pad = zeros if group > 64 and (unit % 64 == 0 or counts is not None) else None
        packed: dict[str, Any] = {"q": q.main, "q_v": q.latent, "out": out}
        if counts is not None:
            packed = {n: None if x is None else x.flatten(0, 1) for n, x in packed.items()}
            packed |= {"cu_seqlens_q": counts.starts, "seqused_q": counts.queries}
        result = self.call(
            **packed,
            k=k.transpose(1, 2),
            v=v.transpose(1, 2),
            is_causal=counts is not None,
            seqused_k=lengths,
            max_seqlen_q=queries,
            max_seqlen_k=table.shape[1] * unit,
            page_table=table,
            leftpad_k=pad,
            softmax_scale=scale,
            softcap=softcap,
            num_splits=splits,
        )
        if counts is None:
            return result[0], result[1].mT
        shape = (lanes, queries)
        return result[0].unflatten(0, shape), result[1].T.unflatten(0, shape)

    def chunk(
        self,
        q: Query,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float,
        causal: bool,
        out: Tensor | None = None,
    ) -> Result:
        """Attention of ``[m, H, D]`` over ``[n, Hkv, D]``; causal: the last row sees all.

        Args:
            out: ``[m, H, Dv]`` in the dtype of q to write to; made if None.

        Returns:
            ``[m, H, Dv]`` in the dtype of q, and the fp32 ``[m, H]`` natural log-sum-exp.
        """
        keys = len(k)
        result = self.call(
            q=q.main[None],
            k=k[None],
            v=v[None],
            q_v=None if q.latent is None else q.latent[None],
            out=None if out is None else out[None],
            seqused_k=_counted(keys, k.device),
            max_seqlen_q=len(q.main),
            max_seqlen_k=keys,
            softmax_scale=scale,
            softcap=softcap,
            is_causal=causal,
        )
        return result[0][0], result[1][0].T


@lru_cache(maxsize=64)
def _counted(keys: int, device: torch.device) -> Tensor:
    """Return an int32 ``[1]`` on the device, which all layers of a forward ask for."""
    return torch.full((1,), keys, dtype=torch.int32, device=device)
