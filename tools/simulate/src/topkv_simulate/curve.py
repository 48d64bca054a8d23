"""Hits, misses and bytes of a decode step over buffer sizes, and the buffer that pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen

from topkv_prediction.machine import bytes_ms
from topkv_simulate.replay import Replayer
from topkv_simulate.trace import ROW, TraceError

MULTIPLES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Default buffers, as multiples of the widest selection."""


@frozen(eq=False)
class Point:
    """A buffer and a policy, over all decode steps of all requests of a trace.

    A step is one request's part of a decode forward; warming a prompt is none.

    Attributes:
        buffer: tokens of a lane.
        policy: name.
        hits, misses: units of all steps, layers and lanes.
        bytes: int64 ``[steps]`` loaded in each.
        layers: share of hits of each sparse layer, by number; 0 where none was selected.
        device: bytes of buffers and rings of one request.
        tokens: of all steps, drafts that were rejected among them; None for one a step.
    """

    buffer: int
    policy: str
    hits: int
    misses: int
    bytes: np.ndarray
    layers: dict[int, float]
    device: int
    tokens: int | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes that were loaded for a token."""
        return float(self.bytes.sum()) / (self.tokens or len(self.bytes))

    @property
    def p95(self) -> int:
        """Bytes of a step that 95 % of the steps do not exceed."""
        return int(np.percentile(self.bytes, 95, method="higher"))

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses)

    def as_dict(self, link: float | None, requests: int) -> dict[str, Any]:
        """Return the point as ``topkv simulate --json`` prints it; arguments as of ``load_ms``."""
        shown = {
            "buffer_tokens": self.buffer,
            "policy": self.policy,
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hit_rate,
            "misses_per_step": self.misses / len(self.bytes),
            "bytes_per_step": float(self.bytes.mean()),
            "bytes_per_token": self.bytes_per_token,
            "p95_bytes_per_step": self.p95,
            "device_bytes_per_request": self.device,
            "layer_hit_rates": self.layers,
        }
        return shown if link is None else {**shown, "load_ms": self.load_ms(link, requests)}

    def load_ms(self, link: float, requests: int) -> float:
        """Return the milliseconds of a mean step's loads: bytes over bandwidth, nothing else.

        Args:
            link: GB/s, of 10^9 bytes.
            requests: requests that decode together, each with the mean of the trace.
        """
        return bytes_ms(requests * float(self.bytes.mean()), link)


class Curve:
    """Replays a trace, each buffer and policy once.

    Args:
        replayer: of the trace.

    Raises:
        TraceError: no decode step was recorded, or none selected anything.
    """

    def __init__(self, replayer: Replayer) -> None:
        self.replayer, self.trace = replayer, replayer.trace
        self.shapes = [group.geometry for group in self.trace.groups]
        self._steps = self.trace.rows[:, ROW.warm] == 0
        self._points: dict[tuple[int, str], Point] = {}
        counts = [group.counts[self._steps].any() for group in self.trace.groups]
        if not any(counts):
            raise TraceError(
                "nothing can be counted",
                [f"{int(self._steps.sum())} decode steps, in which no unit was selected"],
            )

    @property
    def tokens(self) -> int:
        """Tokens that decode steps appended, drafts that were rejected among them."""
        return int(self.trace.rows[self._steps, ROW.appended].sum())

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a mean step."""
        return self.tokens / int(self._steps.sum())

    @property
    def least(self) -> int:
        """Tokens of the smallest buffer that holds a selection of every group."""
        return max(shape.select * shape.unit for shape in self.shapes)

    @property
    def recorded(self) -> list[int]:
        """Tokens of the recording's buffer, of each group."""
        return [shape.buffer_slots * shape.unit for shape in self.shapes]

    def totals(self) -> dict[str, int]:
        """Return the coordinator's counts in the recording, of steps and of warming."""
        counts = sum(group.counts.sum((0, 1, 2), dtype=np.int64) for group in self.trace.groups)
        hits, misses = counts.tolist()
        return {"steps": int(self._steps.sum()), "hits": hits, "misses": misses}

    def buffers(self) -> list[int]:
        """Return the recorded buffers and multiples of the selection, up to one that holds the
        longest request."""
        widest = max(shape.unit for shape in self.shapes)
        longest = int(self.trace.rows[:, ROW.high].max())
        sizes = [-(-int(self.least * factor) // widest) * widest for factor in MULTIPLES]
        enough = next((i for i, size in enumerate(sizes) if size >= longest), len(sizes))
        return sorted({*sizes[: enough + 1], *(b for b in self.recorded if b >= self.least)})

    def at(self, buffer: int, policy: str) -> Point:
        """Return the point of a buffer and a policy.

        Args:
            buffer: tokens of a lane, the same in all groups; a part of a unit is not used.
            policy: see ``Replayer.run``.
        """
        if (buffer, policy) not in self._points:
            self._points[buffer, policy] = self._replay(buffer, policy)
        return self._points[buffer, policy]

    def _replay(self, buffer: int, policy: str) -> Point:
        found = self.replayer.run([buffer // shape.unit for shape in self.shapes], policy)
        hits = misses = device = 0
        loaded = np.zeros(int(self._steps.sum()), np.int64)
        layers: dict[int, float] = {}
        for shape, counts in zip(self.shapes, found, strict=True):
            there, lacking = counts.hits[self._steps], counts.misses[self._steps]
            hits, misses = hits + int(there.sum()), misses + int(lacking.sum())
            loaded += lacking.sum((1, 2)) * shape.host_entry_bytes
            slots = buffer // shape.unit + shape.ring_slots
            device += len(shape.layers) * shape.lane_heads * slots * shape.entry_bytes
            share = there.sum((0, 2)) / np.maximum(1, (there + lacking).sum((0, 2)))
            layers |= dict(zip(shape.layers, share.tolist(), strict=True))
        layers = dict(sorted(layers.items()))
        return Point(buffer, policy, hits, misses, loaded, layers, device, self.tokens)

    def recommend(self, buffers: Sequence[int], policy: str, gain: float) -> int | None:
        """Return the smallest buffer that it does not pay to double.

        Args:
            buffers: sizes to choose from, in tokens.
            policy: name of the policy.
            gain: doubling pays if it spares at least this share of the selected units for each
                selection that the added memory could hold.

        Returns:
            None if doubling the largest still pays.
        """
        for buffer in sorted(buffers):
            now, doubled = self.at(buffer, policy), self.at(2 * buffer, policy)
            least = gain * buffer / self.least
            if now.misses - doubled.misses < least * (now.hits + now.misses):
                return buffer
        return None
