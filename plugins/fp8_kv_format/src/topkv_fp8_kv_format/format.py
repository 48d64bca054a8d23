"""The KV format ``fp8``, in torch and with a kernel that packs; backends share its rows."""

from __future__ import annotations

from topkv_authoring.latent_fp8 import LatentFp8 as LatentFp8
from topkv_authoring.latent_fp8 import LatentFp8Kernels as LatentFp8Kernels
