"""Predictions for users: time of a step either way, what fits, and from where on topkv pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import floor
from typing import Any

from attrs import frozen

from topkv.errors import ConfigError
from topkv.messages import shown
from topkv_prediction.machine import Machine
from topkv_prediction.step import LONG, Held, StepModel, StepTime

HIT_RATE = 0.85
"""The hit rate of a step of one token that is assumed where nothing was counted yet."""

ACCEPT = 0.5
"""The share of drafts that is assumed to be accepted where nobody says."""

ERROR = 0.06
"""The largest error of a prediction of ``benchmarks/results/captured_steps.jsonl``, as a share."""

FARTHEST = 10**7
"""Contexts and batches beyond which nobody asks whether topkv pays."""

_GIB = 2**30


@frozen(kw_only=True)
class Prediction:
    """A decode step of topkv beside that of a cache which stays on the GPU, both captured.

    Attributes:
        context, requests, hit_rate, queries, accept: as they were asked for.
        topkv: milliseconds of a step as configured.
        resident: milliseconds of a step over a cache that stays on the GPU.
        held: bytes that a request of this context holds.
        memory: bytes on the device for caches; None where nobody said.
        topkv_full, resident_full: tokens a second of as many requests as ``memory`` holds.
        context_from: tokens from which on topkv is faster at this many requests and this hit
            rate; None for never.
        requests_from: requests from which on it is faster at this context; None for never.
        hit_rate_from: hit rate from which on it is faster at this context and as many requests;
            None where no hit rate suffices.
        machine: rates and costs that it was worked out with.
    """

    context: int
    requests: int
    hit_rate: float
    topkv: StepTime
    resident: StepTime
    held: Held
    memory: int | None
    topkv_full: float | None
    resident_full: float | None
    context_from: int | None
    requests_from: int | None
    hit_rate_from: float | None
    machine: Machine
    queries: int = 1
    accept: float = ACCEPT

    @property
    def tokens(self) -> float:
        """Tokens of each request that a step leaves: one, and the drafts that are accepted."""
        return 1 + self.accept * (self.queries - 1)

    @property
    def fits_topkv(self) -> int | None:
        """Requests of this context that ``memory`` holds through topkv."""
        return None if self.memory is None else self.memory // self.held.device

    @property
    def fits_resident(self) -> int | None:
        """Requests of this context that ``memory`` holds on the GPU alone."""
        return None if self.memory is None else self.memory // self.held.resident

    @property
    def verdict(self) -> str:
        """Words for which one is faster, unless the difference is within the model's error."""
        ratio = self.topkv.ms / self.resident.ms
        if abs(ratio - 1) <= ERROR:
            return f"about as fast, within {ERROR:.0%}"
        return f"{1 / ratio:.2f} times as fast" if ratio < 1 else f"{ratio:.2f} times as slow"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        one = self.topkv
        yield (
            f"predicted for {self.requests} x {self.context} tokens at {self.hit_rate:.0%} hits, "
            f"link {self.machine.link:.1f} GB/s, device memory {self.machine.memory:.0f} GB/s, "
            f"captured steps{self._verifying()}:"
        )
        yield (
            f"topkv {one.ms:.2f} ms a step ({one.link:.2f} of them wait for the link), a cache on "
            f"the GPU {self.resident.ms:.2f}: topkv is {self.verdict}"
        )
        if self.queries > 1:
            tokens = 1e3 * self.requests * self.tokens
            ours, theirs = tokens / one.ms, tokens / self.resident.ms
            yield f"that is {ours:.0f} tokens/s through topkv, and {theirs:.0f} without"
        limits = (
            ("no context", self.context_from, "{} tokens"),
            ("no number of requests", self.requests_from, "{} requests"),
            ("no hit rate", self.hit_rate_from, "{:.1%} hits"),
        )
        found = [none if value is None else form.format(value) for none, value, form in limits]
        yield f"topkv is faster from here on, the rest as above: {', '.join(found)}"
        sizes = (self.held.device, self.held.host, self.held.resident)
        gib = "a request holds {:.3f} GiB on the GPU and {:.3f} on the host, or {:.3f} on the GPU"
        yield gib.format(*(size / _GIB for size in sizes))
        if self.memory is not None:
            yield (
                f"{self.memory / _GIB:.1f} GiB on the GPU hold {self.fits_topkv} of them through "
                f"topkv, {self.topkv_full:.0f} tokens/s, or {self.fits_resident} without, "
                f"{self.resident_full:.0f} tokens/s"
            )

    def _verifying(self) -> str:
        """Words for the tokens of a step, where it verifies some."""
        if self.queries == 1:
            return ""
        return f" of {self.queries} tokens of each, of which {self.tokens:g} stay"


def assumed_hits(queries: int) -> float:
    """Return the hit rate that is assumed of steps of several tokens, each of which misses as many
    units as one that is alone."""
    return max(0.0, 1 - queries * (1 - HIT_RATE))


def predict(
    model: StepModel,
    context: int,
    requests: int,
    hit_rate: float | None = None,
    memory: int | None = None,
    queries: int = 1,
    accept: float = ACCEPT,
) -> Prediction:
    """Predict with a model of steps.

    Args:
        model: of a configuration on a machine.
        context: tokens of each request.
        requests: that decode together.
        hit_rate: share of the units that a step selects that need no load; ``assumed_hits`` by
            default.
        memory: bytes on the device for caches.
        queries: tokens of each request that a step verifies, over either cache. What drafts cost
            is not known here.
        accept: share of the drafts, which are all but one of them, that are accepted.

    Raises:
        ConfigError: with every reason why this cannot be asked.
    """
    asked = {"context": context, "requests": requests, "hit_rate": hit_rate, "memory": memory}
    check(**asked, queries=queries, accept=accept)
    hit_rate = assumed_hits(queries) if hit_rate is None else hit_rate
    kept = 1 + accept * (queries - 1)

    def longer(tokens: float, rows: float, rate: float) -> float:
        """Return the milliseconds that a step of topkv takes more."""
        return model.topkv(tokens, rows, rate, queries).ms - model.resident(tokens, rows).ms

    held = model.held(context)
    full = None if memory is None else (memory // held.device, memory // held.resident)
    many, few = full or (0, 0)
    # From here on all of it is linear; before, topkv is at least as fast as that line says.
    low = float(max(model.covered, LONG) + 1)
    return Prediction(
        context=context,
        requests=requests,
        hit_rate=hit_rate,
        topkv=model.topkv(context, requests, hit_rate, queries),
        resident=model.resident(context, requests),
        held=held,
        memory=memory,
        topkv_full=full and 1e3 * many * kept / model.topkv(context, many, hit_rate, queries).ms,
        resident_full=full and 1e3 * few * kept / model.resident(context, few).ms,
        context_from=_falls_below(lambda tokens: longer(tokens, requests, hit_rate), low),
        requests_from=_falls_below(lambda rows: longer(context, rows, hit_rate), 1.0),
        hit_rate_from=_least_rate(lambda rate: longer(context, requests, rate)),
        machine=model.machine,
        queries=queries,
        accept=accept,
    )


def check(**asked: Any) -> None:
    """Raise ConfigError with every value that cannot be asked for; None is left to others."""
    reasons = [
        f"{name} must be {wanted}, got {shown(value)}"
        for name, value in asked.items()
        for wanted, fine in [_WANTED[name]]
        if value is not None and not (_is_number(value) and fine(value))
    ]
    if reasons:
        raise ConfigError("no step can be predicted", reasons)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive_int(value: float) -> bool:
    return isinstance(value, int) and value > 0


_WANTED: dict[str, tuple[str, Callable[[float], bool]]] = {
    "context": ("a positive number of tokens", _positive_int),
    "requests": ("a positive number of requests", _positive_int),
    "queries": ("a positive number of tokens", _positive_int),
    "accept": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "hit_rate": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "memory": ("a positive number of bytes", _positive_int),
    "link": ("a positive number of GB/s", lambda value: 0 < value < float("inf")),
    "bandwidth": ("a positive number of GB/s", lambda value: 0 < value < float("inf")),
}


def _falls_below(longer: Callable[[float], float], low: float) -> int | None:
    """Return the first whole number behind which a function that is linear from ``low`` on is
    negative; None if there is none up to ``FARTHEST``."""
    slope = (longer(low + FARTHEST) - longer(low)) / FARTHEST
    if slope >= 0:
        return None
    first = max(1, floor(low - longer(low) / slope) + 1)
    return first if first <= FARTHEST else None


def _least_rate(longer: Callable[[float], float]) -> float | None:
    """Return the hit rate at which a function that falls linearly with it is 0."""
    most, least = longer(0.0), longer(1.0)
    if least > 0:
        return None
    return 0.0 if most <= 0 else most / (most - least)
