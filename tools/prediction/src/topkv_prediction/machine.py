"""Rates of a GPU and its link, and costs of a captured step beside its bytes."""

from __future__ import annotations

from attrs import frozen

GIGABYTE = 1e9


def bytes_ms(size: float, rate: float) -> float:
    """Return the milliseconds that bytes take.

    Args:
        size: bytes.
        rate: GB/s, of 10^9 bytes.
    """
    return 1e3 * size / (rate * GIGABYTE)


@frozen(kw_only=True)
class Machine:
    """Rates, to be measured or given, and costs that are no bytes.

    The costs are those of one H200 and its host, fitted to ``decode_step.jsonl`` among
    ``benchmarks/results``, ``model_us`` to one step of ``captured_steps.jsonl`` there. A GPU of
    another kind has others: until somebody fits them, a prediction for it is as good as these are
    near.

    Attributes:
        memory: GB/s at which kernels read device memory.
        link: GB/s at which kernels read host memory.
        step_us: cost of a step on the host, before and behind its graph.
        dense_us: cost of a layer that attends to everything.
        sparse_us: cost of a sparse layer: append, selection, plan, load, table and attention.
        column_ns: cost of a sparse layer for each unit of a context that is scored and ranked.
        model_us: cost of a model layer beside attention, whose small kernels fill no GPU.
    """

    memory: float
    link: float
    step_us: float = 150.0
    dense_us: float = 8.8
    sparse_us: float = 28.2
    column_ns: float = 3.81
    model_us: float = 105.0

    def model_ms(self, weights: int, layers: int) -> float:
        """Return a step's milliseconds without attention, if it reads ``weights`` bytes."""
        return bytes_ms(weights, self.memory) + layers * self.model_us / 1e3
