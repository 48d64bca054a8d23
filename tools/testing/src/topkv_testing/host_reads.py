"""Refuse, on a CPU, calls that would make the host wait for a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from topkv_testing.kit import Subject

aten = torch.ops.aten

_OPERATORS = {
    aten._local_scalar_dense: "reads a number, as item(), int(), float() or bool() do",
    aten.equal: "compares to a bool of Python",
    aten.nonzero: "counts: its shape depends on data",
    aten.masked_select: "counts: its shape depends on data",
    aten._unique2: "counts: its shape depends on data",
    aten.unique_dim: "counts: its shape depends on data",
    aten.unique_consecutive: "counts: its shape depends on data",
}

_METHODS = {
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.cpu: "cpu",
    Tensor.__array__: "__array__",
}


def _counts(function: Any, args: tuple[Any, ...]) -> bool:
    """Return True if the call indexes by a mask, or repeats by counts on the device."""
    packet = function.overloadpacket
    if packet in (aten.index, aten.index_put, aten.index_put_):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        # One value for all that a mask holds is filled in, without a count.
        return bool(masks) and (packet is aten.index or args[2].numel() != 1)
    return packet is aten.repeat_interleave and function._overloadname == "Tensor"


def _refuse(what: str, why: str) -> None:
    raise AssertionError(
        f"{what} in a hot hook {why}. On a device the host would wait for it, and no CUDA graph "
        "could hold it: keep the value in a tensor"
    )


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        why = _OPERATORS.get(func.overloadpacket)
        if why is None and _counts(func, args):
            why = "counts: its shape depends on data"
        if why is not None:
            _refuse(str(func), why)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            _refuse(f"Tensor.{_METHODS[func]}", "copies to the host")
        return func(*args, **(kwargs or {}))


def require_interpreted(subject: Subject) -> None:
    """Skip the test unless it runs kernels on a CPU that the entry says can be captured."""
    if subject.tier.name != "interpret" or not subject.entry.capabilities.capture:
        pytest.skip("of kernels on a CPU that state capture; on a device a graph shows it")


def require_graph(subject: Subject) -> None:
    """Skip the test unless a CUDA graph can hold what it runs."""
    if subject.tier.name != "gpu" or not subject.entry.capabilities.capture:
        pytest.skip("needs a CUDA device, and an entry that states capture")


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Make torch refuse to read a tensor on the host, or to make a shape from data.

    Triton's interpreter reads memory and not tensors, so kernels may be launched.

    Raises:
        AssertionError: where it is asked to.
    """
    with _Methods(), _Operators():
        yield
