"""Benches of the conformance kit for Double Sparsity, in shapes that a test chooses."""

from __future__ import annotations

import json
import math

import pytest
import torch

from topkv_double_sparsity import reference
from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.kit import subject_of
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import all_tiers


def sample_of(count):
    """Tokens of the sample, as the README says: the middle one of every s, s a power of two."""
    stride = 1
    while count > stride * reference.SAMPLE:
        stride *= 2
    return list(range(stride // 2, count, stride))


class Bench(AlgorithmBench):
    """A bench with a case of its own and a float64 oracle."""

    def __init__(
        self,
        tier,
        *,
        kv_heads=2,
        group=2,
        dim=16,
        page=4,
        scope="kv_head",
        dtype=torch.float32,
        select=5,
        units=40,
        seed=0,
        requests=2,
        label="bf16",
        **params,
    ):
        params["label"] = label
        geometry = Geometry(kv_heads, group, dim, 1, page, scope, dtype)
        subject = subject_of("double_sparsity", "algorithm", tier)
        case = Case(
            geometry=geometry,
            params=params,
            select=select,
            ring=2,
            keys="normal",
            seed=seed,
            least_units=units,
            stale=math.nan,
        )
        super().__init__(subject, case, requests=requests)

    sample_of = staticmethod(sample_of)

    @property
    def settings(self):
        return self.algorithm.settings

    def chosen_channels(self, slot):
        """int64 ``[Hkv, r]`` on the CPU."""
        return self.algorithm.channels(self.layer)[slot].cpu().long()

    def labels(self, slot):
        """float64 ``[n, Hkv, r]`` as a reader of the pools understands them."""
        held = self.stored(slot)
        if not self.settings.int4:
            return held["labels"].double()
        low, high = held["labels"] % 16, held["labels"] // 16
        codes = torch.cat([low, high], -1)[..., : self.settings.channels].double()
        narrowed = codes * held["meta"][..., :1].double() + held["meta"][..., 1:].double()
        return narrowed * self.algorithm.ranges(self.layer)[slot, ..., 1].cpu().double()

    def oracle(self, slot, q):
        """float64 scaled logits ``[H, n]`` over the selectable tokens, from the stored labels."""
        count, heads = self.selectable(slot), self.model.num_heads
        labels, channels = self.labels(slot)[:count], self.chosen_channels(slot)
        logits = torch.empty(heads, count, dtype=torch.float64)
        for head in range(heads):
            kv_head = head // self.model.group_size
            wanted = q[0, head].double()[channels[kv_head]]
            logits[head] = (labels[:, kv_head] * wanted).sum(1) * self.model.scale
        return logits

    def lane_weights(self, logits):
        """Mean over the query heads of exp(logit - lse of the sample), float64 ``[lanes, n]``."""
        lse = logits[:, sample_of(logits.shape[1])].logsumexp(1, keepdim=True)
        return (logits - lse).exp().unflatten(0, (self.group.lane_heads, -1)).mean(1)

    def chosen(self, q, slot=0):
        """Sets of selected tokens of each lane."""
        return [set(lane) for lane in lanes(self.retrieve(q[None], [slot]))[0]]


@pytest.fixture(scope="session")
def bench():
    return Bench


@pytest.fixture
def channel_file(tmp_path):
    """Writes a calibration file of rows of importance, such as ``ranked`` makes, and names it."""

    def write(layers, **further):
        path = tmp_path / "file.json"
        content = {"format": "topkv-double-sparsity-1", "kind": "importance"}
        path.write_text(json.dumps({**content, "layers": layers, **further}))
        return str(path)

    def ranked(*orders):
        """Rows in which each channel is more important than those behind it in an order."""
        return [
            [float(len(order) - order.index(c)) for c in range(len(order))] for order in orders
        ]

    write.ranked = ranked
    return write


def pytest_generate_tests(metafunc):
    # The kit's own suites are parametrized by the kit.
    if "tier" in metafunc.fixturenames and metafunc.cls is None:
        marks = {"gpu": [pytest.mark.gpu]}
        tiers = [pytest.param(t, id=t.name, marks=marks.get(t.name, [])) for t in all_tiers()]
        metafunc.parametrize("tier", tiers)
