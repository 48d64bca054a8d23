"""The observer against the conformance kit, read as Prometheus reads it."""

from __future__ import annotations

from functools import partial

import pytest
from prometheus_client import REGISTRY

from topkv_testing.observers import ObserverOptions, ObserverTests

COUNTERS = ("topkv_forwards_total", "topkv_prompt_tokens_total", "topkv_decoded_tokens_total")
OF_LAYERS = ("topkv_hits_total", "topkv_misses_total", "topkv_loaded_bytes_total")
HELD = ("topkv_pages", "topkv_used_pages", "topkv_slots", "topkv_used_slots")


def scraped(observer):
    """Every sample of one observer: by name, and by layer where there is one."""
    own = str(observer.counts.coordinator)
    return {
        (sample.name, sample.labels.get("layer")): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("topkv_") and sample.labels["coordinator"] == own
    }


def expected(reported, every):
    """Samples as in ``scraped``, from the forwards that the suite ran."""
    ended = [forward for forward in reported if forward.ended]
    looks = ended[: len(ended) // every * every]
    rows = [slot for forward in ended for slot in forward.slots if slot >= 0]
    counts = (len(ended), sum(forward.prompt_tokens for forward in ended), len(rows))
    samples = {(name, None): value for name, value in zip(COUNTERS, counts, strict=True)}
    for layer in reported[-1].totals.layers:
        seen = looks[-1].totals.layers[layer] if looks else None
        values = (seen.hits, seen.misses, seen.loaded_bytes) if seen else (0, 0, 0)
        samples |= {
            (name, str(layer)): value for name, value in zip(OF_LAYERS, values, strict=True)
        }
    held = reported[-1].occupancy
    values = (held.pages, held.used_pages, held.slots, held.used_slots)
    return samples | {(name, None): value for name, value in zip(HELD, values, strict=True)}


class TestPrometheus(ObserverTests):
    @pytest.fixture
    def plugin(self):
        return "prometheus"

    @pytest.fixture(params=[1, 3])
    def options(self, request):
        # The suite runs a few forwards, so the device is looked at more often than by default.
        every = {"every": request.param}
        oracle = partial(expected, every=request.param)
        return ObserverOptions(says=scraped, oracle=oracle, params=every)
