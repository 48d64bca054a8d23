"""The setting ``verification``: who is refused, and queries that are served one by one."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.config import SparseConfig, lower
from topkv.errors import ConfigError
from topkv_testing.machines.lifecycle_model import LAYERS, MODEL, doubles, make_coordinator
from topkv_testing.models.doubles import GATHER, SCRIPTED
from topkv_testing.tiers import tier

CPU = tier("cpu")


def of_one_query(entry):
    return evolve(
        entry, name=f"{entry.name}_one", capabilities=evolve(entry.capabilities, queries=1)
    )


REGISTRY = doubles(of_one_query(GATHER), of_one_query(SCRIPTED))


def lowered(**options):
    config = SparseConfig(**{"algorithm": "scripted", "backend": "gather", "unit": 2, **options})
    return lower(config, MODEL, device=CPU.device, registry=REGISTRY)


def test_joint_verification_names_plugins_of_one_query():
    with pytest.raises(ConfigError) as refused:
        lowered(algorithm="scripted_one", backend="gather_one", max_queries=3)
    reasons = [why for why in refused.value.reasons if "queries" in why]
    assert len(reasons) == 2
    for name, reason in zip(("scripted_one", "gather_one"), reasons, strict=True):
        assert name in reason
        assert "takes at most 1 queries a row at once, got max_queries 3" in reason
        assert "set verification to 'exact'" in reason


@pytest.mark.parametrize(
    ("verification", "backend", "queries"),
    [
        ("joint", "gather", {"sparse": 3, "resident": 3}),
        ("exact", "gather", {"sparse": 1, "resident": 3}),
        ("exact", "gather_one", {"sparse": 1, "resident": 1}),
    ],
)
def test_dense_layers_are_read_once_where_the_backend_can(verification, backend, queries):
    made = lowered(
        verification=verification, backend=backend, max_queries=3, layers={"1": "resident"}
    )
    assert {group.shape.residency: group.queries for group in made.groups} == queries
    assert {group.singly for group in made.groups if group.queries == 3} <= {False}
    assert all(group.singly for group in made.groups if group.queries == 1)


def rows_of(coordinator, slots, steps, queries):
    """Outputs of ``steps`` tokens of each request, ``queries`` at a time."""
    generator = torch.Generator().manual_seed(3)
    given = torch.randn(3, LAYERS, len(slots), steps, 4, 4, generator=generator)
    outs = []
    for at in range(0, steps, queries):
        coordinator.forward_begin(slots, queries=queries)
        part = given[:, :, :, at : at + queries].flatten(2, 3)
        for layer, (q, k, v) in enumerate(part.unbind(1)):
            out = coordinator.attention(layer, q, k[:, :2], v[:, :2])
            outs.append(out.unflatten(0, (len(slots), queries)))
        coordinator.forward_end()
    return torch.stack(outs).unflatten(0, (-1, LAYERS)).transpose(0, 2).flatten(2, 3)


@pytest.mark.parametrize("backend", ["gather", "gather_one"])
@pytest.mark.parametrize("share", ["F", "FS"])
def test_dense_and_sharing_layers_answer_each_query_as_without_drafts(backend, share):
    found = []
    for queries in (1, 4):
        coordinator = make_coordinator(
            CPU,
            registry=REGISTRY,
            backend=backend,
            share=share,
            algorithm="scripted_one",
            max_queries=queries,
            verification="exact",
            ring_tokens=8,
        )
        slots = [coordinator.request_begin() for _ in range(2)]
        found.append(rows_of(coordinator, slots, 12, queries))
        coordinator.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
