"""The interpreter of the kit gives what Triton's own gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from topkv_testing import interpreter as quickened
from topkv_testing.tiers import tier

SIZES = [(1, 16), (7, 16), (64, 32)]


@triton.jit
def scaled(x, factor, BLOCK: tl.constexpr):
    """Return a block times a factor, in fp32 and back."""
    return (x.to(tl.float32) * factor + tl.arange(0, BLOCK)).to(x.dtype)


@triton.jit
def row_kernel(p_x, p_ids, p_sums, n, BLOCK: tl.constexpr):
    """Write scaled rows, places of the positive elements and their prefix sums, and a sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < n
    x = tl.load(p_x + row * BLOCK + column, live, other=0.0)
    positive = (x > 0).to(tl.int32)
    rank = tl.cumsum(positive, 0) - positive
    tl.store(p_ids + row * BLOCK + rank, column, live & (positive != 0))
    tl.store(p_sums + row, tl.sum(tl.where(live, x.to(tl.float32), 0.0), 0))
    outer = scaled(x, 0.5, BLOCK)[:, None] * scaled(x, 2.0, BLOCK)[None, :]
    tl.store(p_x + row * BLOCK + column, scaled(tl.max(outer, 1), 3.0, BLOCK), live)


def results() -> list[torch.Tensor]:
    """Run the kernel for rows of several sizes and dtypes."""
    found = []
    for dtype in (torch.float32, torch.float16):
        for rows, block in SIZES:
            draw = torch.Generator().manual_seed(rows)
            x = torch.randn((rows, block), generator=draw).to(dtype)
            ids, sums = torch.full((rows, block), -1, dtype=torch.int32), torch.zeros(rows)
            row_kernel[(rows,)](x, ids, sums, block - 3, BLOCK=block)
            found += [x, ids, sums]
    return found


@pytest.mark.skipif(tier("interpret").missing is not None, reason="kernels run on the GPU")
def test_results_are_those_of_triton_to_the_bit(tmp_path: Path):
    at = tmp_path / "plain.pt"
    code = (
        "import sys, torch, test_interpreter; torch.save(test_interpreter.results(), sys.argv[1])"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent)}
    plain = "from topkv_testing import interpreter; interpreter.quicken = lambda: None; "
    subprocess.run([sys.executable, "-c", plain + code, str(at)], env=environment, check=True)
    assert interpreter._get_np_dtype.__module__ == quickened.__name__
    for ours, theirs in zip(results(), torch.load(at), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert tl.core.is_builtin(tl.load), "the language is Triton's again behind a launch"


def test_a_triton_of_another_form_goes_on_as_it_does(monkeypatch):
    core = interpreter.tl.core
    places = [
        *((interpreter, name) for name in ("_patch_lang", "_patch_builtin", "_get_np_dtype")),
        *((core.block_type, "__init__"), (core.tensor, "__init__")),
    ]

    def other(self, what, else_):
        """A function that takes other arguments."""

    for owner, name in places:
        monkeypatch.setattr(owner, name, other)
    quickened.quicken.__wrapped__()
    assert all(getattr(owner, name) is other for owner, name in places)
