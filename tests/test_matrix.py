"""Every supported cell of the matrix decodes right, and the page of the docs shows them all.

A coordinator reads a prompt and decodes; the output of each step must be float64 attention over
the units that it selected, wherever they were.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import astuple
from click.testing import CliRunner

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.errors import ConfigError
from topkv.plugins import registry
from topkv.types import Index, IndexerShape, ModelShape
from topkv_cli.doctor import libraries
from topkv_cli.group import topkv as command
from topkv_cli.matrix import matrix
from topkv_testing.integrity import check_integrity
from topkv_testing.oracle import attention
from topkv_testing.tiers import tier

PAGE = Path(__file__).parent.parent / "docs" / "matrix.md"
CELLS = matrix(registry().records())
STEPS = 3
# Parameters with which an algorithm takes small sizes.
PARAMS = {
    "clusterkv": {"tokens_per_cluster": 4, "window": 8, "segment": 32, "sinks": 2},
    "pqcache": {"window": 16, "segment": 64},
    "snapkv": {"window": 4, "generated": STEPS + 1},
    "deepseek_dsa": {"keys": "bf16"},
}


MARKS = {"gpu": "gpu", "interpret": "nightly"}
"""Marks of tiers; an interpreted cell takes seconds, and the kits run the same kernels."""


def marks_of(cell, tier_name):
    """Marks of a cell on a tier; of interpreted cells Quest's run at each commit."""
    mark = MARKS.get(tier_name)
    if mark == "nightly" and cell.algorithm == "quest":
        mark = "slow"
    return [getattr(pytest.mark, mark)] if mark else []


def supported():
    """The supported cells, each on the tiers where both plugins run."""
    found = []
    for cell in CELLS:
        for name in cell.tiers:
            missing = tier(name).missing
            marks = marks_of(cell, name)
            if missing:
                marks.append(pytest.mark.skip(reason=f"tier {name!r}: {missing}"))
            what = (cell.algorithm, cell.backend, cell.attention, cell.scope, str(cell.unit))
            found.append(pytest.param(cell, tier(name), id="-".join([*what, name]), marks=marks))
    return found


def lacking(cell):
    """Reason why the library of a backend is missing; empty if it is there, or none is called."""
    reported = libraries(registry().get("backend", cell.backend))
    return [] if any(": ok" in line for line in reported) else reported


def model_of(cell):
    """A small model that the backend takes, with the index that the algorithm asks for."""
    caps = registry().get("backend", cell.backend).entry.capabilities
    asks = registry().get("algorithm", cell.algorithm).entry.capabilities.needs_index
    dtype = torch.float32 if "float32" in (caps.dtypes or ("float32",)) else torch.bfloat16
    if cell.attention == "gqa":
        indexer = IndexerShape(2, 32) if asks else None
        return ModelShape(1, 4, 2, (caps.head_dims or (64,))[0], dtype, 0.2, indexer=indexer)
    # Libraries take the rows of DeepSeek alone.
    dim = (caps.head_dims or ((576,) if caps.tiers == ("gpu",) else (40,)))[0]
    return ModelShape(1, 4, 1, dim, dtype, 0.2, "mla", dim - dim // 9, IndexerShape(16, 32))


class Run:
    """One request of one layer, and every token that it was given, on the CPU."""

    def __init__(self, cell, on, most=None, **options):
        """Make room for ``most`` tokens; ``options`` override those of the configuration.

        Skips the test where the library that the backend calls is not there.
        """
        if missing := lacking(cell):
            pytest.skip(f"{cell.backend}: {'; '.join(missing)}")
        unit, self.on, self.model = cell.unit, on, model_of(cell)
        self.length, self.most = 0, most or 12 * max(unit, 4) + STEPS
        budget = 5 * max(unit, 4)
        page = max(unit, 16)
        config = {
            "algorithm": cell.algorithm,
            "params": PARAMS.get(cell.algorithm),
            "backend": cell.backend,
            "impl": on.impl,
            "unit": unit,
            "scope": cell.scope,
            "budget": budget,
            "buffer": budget,
            "ring_tokens": 2 * unit,
            "page_tokens": page,
            "max_requests": 1,
            "max_request_tokens": -(-self.most // page) * page,
            "max_tokens": -(-self.most // page) * page,
            "dense_layers": [],
        }
        config = SparseConfig(**{**config, **options})
        lowered = lower(config, self.model, device=on.device, registry=registry())
        self.coordinator = SparseCoordinator(lowered, registry())
        self.slot = self.coordinator.request_begin()
        generator, shape = torch.Generator().manual_seed(1), self.model

        def made(*sizes):
            return torch.randn(self.most, *sizes, generator=generator).to(shape.dtype)

        self.q, self.k = (
            made(shape.num_heads, shape.head_dim),
            made(shape.num_kv_heads, shape.head_dim),
        )
        self.v = made(shape.num_kv_heads, shape.head_dim)
        if shape.attention == "mla":
            self.v = self.k[..., : shape.out_dim]
        self.index = None
        if shape.indexer:
            sizes = (shape.indexer.num_heads, shape.indexer.head_dim)
            weights = made(sizes[0]).float() if shape.attention == "mla" else None
            self.index = Index(made(*sizes), made(sizes[1]), weights)

    def forward(self, count, decode):
        """Outputs of the next tokens, on the CPU."""
        rows = slice(self.length, self.length + count)
        if decode:
            self.coordinator.forward_begin(decode=[self.slot])
        else:
            self.coordinator.forward_begin(prefill=[(self.slot, count)])
        q, k, v = (x[rows].to(self.on.device) for x in (self.q, self.k, self.v))
        if self.model.attention == "mla":
            v = k
        index = None
        if self.index:
            part = self.index.rows(rows)
            given = [None if x is None else x.to(self.on.device) for x in astuple(part)]
            index = Index(*given)
        out = self.coordinator.attention(0, q, k, v, index).cpu()
        self.selected = self.selection().cpu().tolist() if decode else None
        self.coordinator.forward_end()
        self.length += count
        return out

    def selection(self):
        """Ids that the algorithm has selected in this step."""
        return self.coordinator.lanes[0].selection.ids

    def expected(self):
        """Attention of the newest token over what its step has selected, and the tail."""
        newest = self.length - 1
        heads = self.model.num_kv_heads // len(self.selected)
        size = self.model.num_heads // len(self.selected)
        outs = []
        for lane, ids in enumerate(self.selected):
            tokens = self.attended(ids)
            assert len(tokens) < self.length, "everything was selected: nothing is shown"
            at, kv = sorted(tokens), slice(lane * heads, (lane + 1) * heads)
            q = self.q[newest : newest + 1, lane * size : (lane + 1) * size]
            k, v = self.k[at, kv], self.v[at, kv]
            outs.append(attention(q, k, v, self.model.scale)[0][0])
        return torch.cat(outs)

    def attended(self, ids):
        """Tokens of the selected units, and of the tail unit where it is forced."""
        unit, newest = self.coordinator.lanes[0].group.unit, self.length - 1
        tokens = {i * unit + j for i in ids if i >= 0 for j in range(unit)}
        if self.coordinator.lanes[0].tables.table.shape[1] > len(ids):
            tokens |= set(range(newest // unit * unit, newest + 1))
        return tokens


@pytest.mark.parametrize(("cell", "on"), supported())
def test_a_supported_cell_decodes_over_what_it_selects(cell, on):
    run = Run(cell, on)
    run.forward(run.most - STEPS, decode=False)
    band = 1e-4 if run.model.dtype is torch.float32 else 3e-2
    for _ in range(STEPS):
        (out,) = run.forward(1, decode=True)
        torch.testing.assert_close(out.double(), run.expected(), rtol=band, atol=band)
    check_integrity(run.coordinator)
    run.coordinator.close()


def test_every_pair_has_an_answer():
    pairs = {(cell.algorithm, cell.backend) for cell in CELLS}
    names = {
        kind: {r.name for r in registry().records() if r.kind == kind and r.entry}
        for kind in ("algorithm", "backend")
    }
    assert pairs == {(a, b) for a in names["algorithm"] for b in names["backend"]}
    assert all(bool(cell.reasons) == (cell.state == "refused") for cell in CELLS)
    assert any(cell.state == "supported" for cell in CELLS)


@pytest.mark.parametrize("stage", [None, "regranulate"])
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.state != "untested"], ids=str)
def test_lowering_answers_as_the_matrix(cell, stage):
    """Entries are read in two places: without torch for people, with a model for a coordinator."""
    config = SparseConfig(
        algorithm=cell.algorithm,
        params=PARAMS.get(cell.algorithm),
        backend=cell.backend,
        unit=cell.unit,
        scope=cell.scope,
        stages=[stage] if stage and cell.stage else [],
        budget=5 * max(cell.unit, 4),
        buffer=1024,
        page_tokens=max(64, cell.unit),
        ring_tokens=2 * max(64, cell.unit),
        max_tokens=1024,
        dense_layers=[],
    )
    device = torch.device("cuda")  # nothing is allocated, and every plugin has kernels
    try:
        lower(config, model_of(cell), device=device, registry=registry())
        reasons = []
    except ConfigError as error:
        reasons = error.reasons
    helped = stage is not None and cell.stage == stage
    assert bool(reasons) == bool(cell.reasons and not helped), reasons


def test_the_page_of_the_docs_is_the_matrix():
    """Regenerate it with ``topkv plugins --markdown``."""
    table = CliRunner().invoke(command, ["plugins", "--markdown"]).stdout
    assert PAGE.read_text(encoding="utf-8").endswith(table)
