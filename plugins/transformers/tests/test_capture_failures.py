"""Streams, allocator and forwards behind a recording that fails."""

from __future__ import annotations

import pytest
import torch

import topkv
from topkv_transformers import capture

SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False}


def test_a_failed_recording_leaves_the_device_as_it_was(tiny, recording):
    """Recordings of each number of rows fail; torch leaves a capture's stream current then."""
    model, device = tiny.model(), tiny.device
    mlp = model.model.layers[1].mlp

    class Syncing(type(mlp)):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 0.5)

    mlp.__class__ = Syncing
    with topkv.attach(model, tiny.settings(**SPARSE, **recording)) as handle:
        for pads in ((0,), (0, 4)):
            before = torch.cuda.current_stream() if device.type == "cuda" else None
            with pytest.warns(RuntimeWarning, match="cannot be captured"):
                model.generate(**tiny.prompt(21, pads), do_sample=False, max_new_tokens=5)
            if device.type == "cuda":
                assert torch.cuda.current_stream() == before
                torch.cuda.empty_cache()  # refused while the allocator believes in a capture
        assert handle.capture.eager.keys() == {(1, 1), (2, 1)}


def test_a_capture_that_cannot_end_gives_the_stream_back(monkeypatch):
    """``torch.cuda.graph`` is run on streams and a graph that are distinguished by name."""
    current = ["the caller's"]

    class Switched:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, current[0] = current[0], self.stream

        def __exit__(self, *exception):
            current[0] = self.before

    class Graph:
        def capture_begin(self, *args, **kwargs):
            assert current == ["the capture's"]

        def capture_end(self):
            raise RuntimeError("operation failed due to a previous error during capture")

    fakes = {
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "stream": Switched,
        "Stream": lambda *args, **kwargs: "the capture's",
        "graph_pool_handle": lambda: (0, 1),
        "current_device": lambda: 0,
        "current_stream": lambda *args: current[0],
        "CUDAGraph": Graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    ended = []
    end = lambda device, pool: ended.append(pool)  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)

    def body():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error"):
        capture.CudaRecorder()(body)
    assert current == ["the caller's"]
    assert ended == [(0, 1)]
