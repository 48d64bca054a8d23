"""One range a forward, whatever becomes of the forward; and torch builds without NVTX."""

from __future__ import annotations

import pytest
import torch
from torch.cuda import nvtx

from topkv.entries import NoParameters
from topkv.errors import CapabilityError
from topkv.hooks.observer import ForwardReport, ObserverSetup
from topkv.report import Occupancy, TransferReport
from topkv_nvtx.observer import NvtxObserver
from topkv_nvtx.ranges import describe


def report(*slots, tokens=0):
    """Make the report of a forward that counts nothing."""
    nothing = TransferReport(0, 0, 0)
    return ForwardReport(
        slots, tokens, lambda: nothing, lambda: nothing, lambda: Occupancy(1, 0, 1, 0)
    )


def test_each_forward_has_a_range_and_none_stays_open(timeline):
    observer = NvtxObserver(ObserverSetup(None, NoParameters()))
    theirs = timeline.start("somebody else's")
    observer.before_forward(report(0, -1, 2, tokens=5))
    assert timeline.open == [theirs, theirs + 1]
    observer.before_forward(report(0))  # the one before was dropped
    assert timeline.open == [theirs, theirs + 2]
    observer.after_forward(report(0))
    observer.before_forward(report(tokens=9))
    observer.after_forward(report(tokens=9))
    assert timeline.open == [theirs]
    assert list(timeline.texts.values())[1:] == [
        "topkv: 2 decode rows, 5 prompt tokens",
        "topkv: 1 decode rows, 0 prompt tokens",
        "topkv: 0 decode rows, 9 prompt tokens",
    ]


def test_torch_without_nvtx_is_refused(monkeypatch):
    def refuses(*args):
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(nvtx, "mark", refuses)
    with pytest.raises(CapabilityError, match="'nvtx' cannot be used") as caught:
        NvtxObserver(ObserverSetup(None, NoParameters()))
    assert "install a build for CUDA" in str(caught.value)
    assert "torch.cuda.nvtx: RuntimeError: NVTX functions not installed" in str(caught.value)
    assert describe() == ["torch.cuda.nvtx: RuntimeError: NVTX functions not installed"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a build for CUDA")
def test_builds_for_cpus_have_none():
    with pytest.raises(CapabilityError, match="install a build for CUDA"):
        NvtxObserver(ObserverSetup(None, NoParameters()))


@pytest.mark.gpu
def test_the_functions_of_torch_take_what_they_are_given():
    observer = NvtxObserver(ObserverSetup(None, NoParameters()))
    observer.before_forward(report(0))
    assert isinstance(observer.open, int)
    observer.after_forward(report(0))
    assert observer.open is None
    assert describe() == [f"torch.cuda.nvtx: ok, torch {torch.__version__}"]
