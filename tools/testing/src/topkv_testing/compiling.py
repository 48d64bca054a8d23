"""Compile for a GPU what the interpreter launches, on a machine that has none.

The interpreter runs kernels as Python, and takes what Triton's compiler refuses. With
``pytest --compile-for 90`` each launch in the interpreter is handed to the compiler as well, for a
CUDA device of compute capability 9.0: once for each kernel, its dtypes and its switches. A test
with a kernel that it refuses fails. It stops at its first form of the kernel, TTIR, which has all
that the language forbids and takes a tenth of the time; what asks for too much shared memory, say,
shows on a GPU. Nothing is loaded or run.

Kernels are decorated for the interpreter in the process of the tests, so another one compiles.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import wraps
from multiprocessing import get_context
from typing import Any

import pytest
from attrs import field, frozen


@frozen
class Named:
    """A function or kernel, as another process finds it."""

    module: str
    name: str

    def find(self) -> Any:
        """Import the function or kernel with ``TRITON_INTERPRET`` unset, for a device."""
        os.environ.pop("TRITON_INTERPRET", None)
        found = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


@frozen
class Pointer:
    """A tensor, reduced to its dtype, which is all that a compiler needs."""

    dtype: str


@frozen
class Launch:
    """A call of a kernel.

    Attributes:
        kernel: what was called.
        values: arguments by name, ``num_warps`` and its like among them.
        key: what launches have in common that are compiled once.
    """

    kernel: Named
    values: dict[str, Any] = field(eq=False)
    key: tuple[Any, ...]

    @property
    def local(self) -> bool:
        """True if the kernel or an argument was made in a function or a module without a file."""
        named = [self.kernel, *(x for x in self.values.values() if isinstance(x, Named))]
        return any(
            "<locals>" in each.name
            or getattr(sys.modules.get(each.module), "__spec__", None) is None
            for each in named
        )

    @classmethod
    def of(cls, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
        """Make the launch of an interpreted kernel with the arguments that it was given."""
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        values = {name: _reported(value) for name, value in values.items()}
        # Sizes make other code where a kernel asks for them, but drawn cases have hundreds.
        common = tuple(
            (name, type(value) if type(value) in (int, float) else value)
            for name, value in values.items()
        )
        return cls(_named(kernel), values, common)


def _reported(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_reported, value))
    if hasattr(value, "data_ptr"):
        return Pointer(str(value.dtype).removeprefix("torch."))
    return _named(value) if hasattr(value, "fn") and callable(value) else value


def _named(kernel: Any) -> Named:
    return Named(kernel.fn.__module__, kernel.fn.__qualname__)


class Compiler:
    """A process that compiles. It starts with the first launch.

    Args:
        capability: of the CUDA device, 90 say.
    """

    def __init__(self, capability: int) -> None:
        self.capability, self.seen = capability, set[Launch]()
        self._process: ProcessPoolExecutor | None = None

    def compile(self, launch: Launch) -> str | None:
        """Compile a launch that was not seen before; return the error, None without one.

        None too where no other process can import the kernel or one that it calls.

        Raises:
            RuntimeError: the process has ended; its own words are on stderr.
        """
        if launch in self.seen or launch.local:
            return None
        self.seen.add(launch)
        if self._process is None:
            anew = get_context("spawn")
            self._process = ProcessPoolExecutor(1, anew, _begin, (self.capability,))
        return self._process.submit(_answer, launch, sys.path).result()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.shutdown()
            self._process = None


@contextmanager
def launches(take: Callable[[Launch], None]) -> Iterator[None]:
    """Hand over each launch of an interpreted kernel, before it runs."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    @wraps(run)
    def taken(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        take(Launch.of(kernel, args, kwargs))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = taken
    try:
        yield
    finally:
        InterpretedFunction.run = run


class CompilingPlugin:
    """The pytest plugin that compiles the launches of each test.

    Args:
        capability: of ``--compile-for``.
    """

    def __init__(self, capability: int) -> None:
        self.compiler = Compiler(capability)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        wrong: list[str] = []

        def take(launch: Launch) -> None:
            reason = self.compiler.compile(launch)
            if reason is not None:
                wrong.append(f"{launch.kernel}\n{reason}")

        with launches(take):
            result = yield
        if wrong:
            pytest.fail("kernels do not compile:\n" + "\n".join(wrong), pytrace=False)
        return result

    def pytest_sessionfinish(self) -> None:
        self.compiler.close()


class _Absent:
    """A device that compilers may ask about, and that runs nothing."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Enough(Exception):
    """Raised when a kernel is compiled as far as needed."""


def _stop_early() -> None:
    """Make compilers stop after TTIR."""
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages = CUDABackend.add_stages

    def enough(source: Any, metadata: Any) -> Any:
        raise _Enough

    def first(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(backend, stages, *rest)
        stages["ttgir"] = enough

    CUDABackend.add_stages = first


def _begin(capability: int) -> None:
    """Make the process one whose compilers stop early, for a device that is not there."""
    os.environ.pop("TRITON_INTERPRET", None)
    from triton.runtime.driver import driver

    driver.set_active(_Absent(capability))
    _stop_early()


def _answer(launch: Launch, path: list[str]) -> str | None:
    """Compile a launch, with this path of modules; return why that fails, or None."""
    sys.path[:] = path
    import torch
    from triton.runtime.jit import JITFunction, MockTensor

    def made(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(made, value))
        if isinstance(value, Pointer):
            return MockTensor(getattr(torch, value.dtype))
        return value.find() if isinstance(value, Named) else value

    try:
        values = {name: made(value) for name, value in launch.values.items()}
        kernel = launch.kernel.find()
        if not isinstance(kernel, JITFunction):
            return f"its module sets TRITON_INTERPRET before it decorates, got {kernel!r}"
        kernel.warmup(grid=(1,), **values)
    except _Enough:
        return None
    except Exception:
        return traceback.format_exc()
    return None
