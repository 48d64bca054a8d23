"""Launches of the prefill kernel."""

from __future__ import annotations

from torch import Tensor

from topkv_triton_attention.launch import factors, power, upcast
from topkv_triton_attention.prefill_kernels import prefill_kernel

# By padded value dim: queries, keys, warps, stages; for two-byte dtypes, then for fp32.
_PREFILL = {
    (64, 2): (128, 64, 4, 3),
    (128, 2): (128, 64, 8, 3),
    (256, 2): (64, 64, 8, 2),
    (512, 2): (64, 64, 8, 2),
    (64, 4): (32, 32, 4, 2),
    (128, 4): (32, 32, 8, 2),
    (256, 4): (32, 16, 8, 2),
    (512, 4): (16, 16, 8, 1),
}


class Prefiller:
    """``prefill`` and ``prefill_selected`` of the hook specs.

    Args:
        scale: factor of the logits.
        latent: values are the first elements of keys, and ``v`` a view of ``k``.
        softcap: of the logits, see ``topkv.types.ModelShape``.
    """

    def __init__(self, scale: float, latent: bool = False, softcap: float | None = None) -> None:
        self.scale_log2, self.cap_log2 = factors(scale, softcap)
        self.latent = latent

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        out: Tensor,
        lse: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        """See ``topkv.hooks.backend.prefill`` and, for ``keep``, ``prefill_selected``."""
        rows, heads, dim = q.shape
        if not rows:
            return
        values = v.shape[-1]
        block_m, block_n, warps, stages = _PREFILL[max(64, power(values)), q.element_size()]
        if keep is not None:
            block_n = min(block_n, 32)  # the mask takes registers and shared memory too
        prefill_kernel[(-(-rows // block_m), heads)](
            q, k, v, q if keep is None else keep, out, lse,
            rows, k.shape[0], q_start - k_start, self.scale_log2,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            0 if keep is None else keep.stride(0), *out.stride()[:2], *lse.stride(),
            GROUP=heads // k.shape[1], DIM=values, REST=dim - values,
            BLOCK_D=max(16, power(values)), BLOCK_R=max(16, power(max(1, dim - values))),
            BLOCK_M=block_m, BLOCK_N=block_n, LATENT=self.latent, KEEP=keep is not None,
            UPCAST=upcast(q), CAP=self.cap_log2, num_warps=warps, num_stages=stages,
        )  # fmt: skip
