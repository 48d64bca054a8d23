"""Kernels that the interpreter runs are compiled for a GPU that is not there."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from topkv_testing.compiling import Compiler, Launch, Named, Pointer, launches
from topkv_testing.tiers import tier

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def square(x):
    return x * x

@triton.jit
def good_kernel(p_out, count, SIZE: tl.constexpr, CHANGE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(p_out + at, CHANGE(at * 2.0).to(p_out.dtype.element_ty), at < count)

@triton.jit
def tuple_kernel(pools, count, SIZE: tl.constexpr, CHANGE: tl.constexpr):
    at = tl.arange(0, SIZE)
    for each in tl.static_range(2):
        tl.store(pools[each] + at, CHANGE(at * 2.0).to(tl.float32), at < count)

@triton.jit
def bad_kernel(p_out, count, SIZE: tl.constexpr, CHANGE: tl.constexpr):
    at = tl.arange(0, SIZE)
    there, kind = at < count, p_out.dtype.element_ty  # the compiler has no tuples of dtypes
    tl.store(p_out + at, CHANGE(at * 2.0).to(kind), there)

def make():
    @triton.jit
    def twice(x):
        return 2 * x

    return twice
"""
TEST = """
import kernels, pytest, torch

@pytest.mark.parametrize("name", ["good_kernel", "bad_kernel"])
def test_it(name):
    out = torch.zeros(16)
    getattr(kernels, name)[(1,)](out, 3, SIZE=16, CHANGE=kernels.square, num_warps=2)
    assert out.tolist() == [0.0, 4.0, 16.0] + 13 * [0.0]
"""

pytestmark = pytest.mark.skipif(
    tier("interpret").missing is not None, reason="of what the interpreter launches"
)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("kernels")
    del sys.modules["kernels"]


@contextlib.contextmanager
def unwatched():
    """Hand launches to nobody else, whatever the option of this session says."""
    from triton.runtime.interpreter import InterpretedFunction

    watched = InterpretedFunction.run
    InterpretedFunction.run = inspect.unwrap(watched)
    try:
        yield
    finally:
        InterpretedFunction.run = watched


def test_what_the_compiler_refuses_is_reported_once(kernels):
    compiler, found = Compiler(90), []
    out = torch.zeros(16)
    try:
        with (
            unwatched(),
            launches(lambda launch: found.append((launch, compiler.compile(launch)))),
        ):
            for kernel in (kernels.good_kernel, kernels.bad_kernel, kernels.bad_kernel):
                kernel[(1,)](out, 5, SIZE=16, CHANGE=kernels.square)
    finally:
        compiler.close()
    assert out[:6].tolist() == [0.0, 4.0, 16.0, 36.0, 64.0, 0.0]
    (_, good), (launch, bad), (_, again) = found
    assert launch.kernel == Named("kernels", "bad_kernel")
    assert launch.values["p_out"] == Pointer("float32")
    assert launch.values["CHANGE"] == Named("kernels", "square")
    assert (good, again) == (None, None)
    assert "there, kind = at < count" in bad


def test_tensors_in_a_tuple_are_pointers(kernels):
    """Pools that a kernel hands to a device function."""
    found, compiler = [], Compiler(90)
    with unwatched(), launches(found.append):
        kernels.tuple_kernel[(1,)]((torch.zeros(16),) * 2, 3, SIZE=16, CHANGE=kernels.square)
    assert found[0].values["pools"] == (Pointer("float32"),) * 2
    try:
        assert compiler.compile(found[0]) is None
    finally:
        compiler.close()


def test_dtypes_and_switches_make_another_kernel_and_numbers_do_not(kernels):
    def key(dtype=torch.float32, count=3, size=16, change=kernels.square):
        given = (torch.zeros(1, dtype=dtype), count)
        return Launch.of(kernels.good_kernel, given, {"SIZE": size, "CHANGE": change})

    assert key(count=7) == key() == key(size=32)
    assert len({key(), key(dtype=torch.float16), key(change=None), key(size=True)}) == 4


def test_what_no_other_process_can_import_is_left_out(kernels):
    found = []
    with unwatched(), launches(found.append):
        kernels.good_kernel[(1,)](torch.zeros(16), 3, SIZE=16, CHANGE=kernels.make())
    assert [each.local for each in found] == [True]
    assert Compiler(90).compile(found[0]) is None


def test_a_kernel_of_a_module_without_a_file_is_left_out(kernels, monkeypatch):
    """Mutants are such kernels."""
    monkeypatch.setitem(sys.modules, "made", ModuleType("made"))
    found = [Launch(Named(name, "good_kernel"), {}, ()).local for name in ("made", "kernels")]
    assert found == [True, False]


def test_a_module_that_turns_the_interpreter_on_is_reported(tmp_path, monkeypatch):
    first = "import os\nos.environ.setdefault('TRITON_INTERPRET', '1')\n"
    (tmp_path / "turned_on.py").write_text(first + KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    turned_on, compiler, found = __import__("turned_on"), Compiler(90), []
    with unwatched(), launches(found.append):
        turned_on.bad_kernel[(1,)](torch.zeros(16), 3, SIZE=16, CHANGE=turned_on.square)
    try:
        assert "its module sets TRITON_INTERPRET" in compiler.compile(found[0])
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("options", "code"),
    [([], 0), pytest.param(["--compile-for", "90"], 1, marks=pytest.mark.slow)],
)
def test_a_test_whose_kernel_does_not_compile_fails(tmp_path, options, code):
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    reported = "1 failed, 1 passed" if code else "2 passed"
    assert reported in done.stdout
    assert ("kernels do not compile" in done.stdout) == bool(code)
