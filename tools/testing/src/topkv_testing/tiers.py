"""Tiers on which the kit runs a plugin: reference, interpreted kernels, kernels on a GPU."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch
from attrs import frozen

from topkv.entries import TIERS
from topkv_testing.interpreter import quicken

CUDA = torch.cuda.is_available()

# Triton decides when it is imported, so this comes before any module that has kernels.
if not CUDA and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if _INTERPRETED and find_spec("triton"):
    quicken()


@frozen
class Tier:
    """One of ``topkv.entries.TIERS``.

    Attributes:
        name: ``"cpu"``, ``"interpret"`` or ``"gpu"``.
        impl: ``"reference"`` or ``"triton"``, as factories take it.
        device: where the tensors are.
        missing: reason why this machine or process cannot run the tier, None where it can.
    """

    name: str
    impl: str
    device: torch.device
    missing: str | None

    def __str__(self) -> str:
        return self.name


def tier(name: str) -> Tier:
    """The tier of that name."""
    if name == "cpu":
        return Tier(name, "reference", torch.device("cpu"), None)
    if name == "interpret":
        missing = None
        if find_spec("triton") is None:
            missing = "needs triton: pip install 'topkv[triton]'"
        elif not _INTERPRETED:
            missing = (
                "there is a CUDA device; set TRITON_INTERPRET=1 to interpret all the same"
                if CUDA
                else "triton was imported before topkv_testing; set TRITON_INTERPRET=1"
            )
        return Tier(name, "triton", torch.device("cpu"), missing)
    missing = None if CUDA else "needs a CUDA device"
    if CUDA and _INTERPRETED:
        missing = "TRITON_INTERPRET=1 keeps kernels off the device; unset it"
    return Tier(name, "triton", torch.device("cuda" if CUDA else "cpu"), missing)


def all_tiers() -> list[Tier]:
    """Every tier, also those that are missing here."""
    return [tier(name) for name in TIERS]
