"""Any selector with any stages behind it, on any backend, decodes as the model of the chain does.

The selector offers the units that it selects alone with as wide a budget; each stage leaves the
units that its formula leaves in float64; outputs are float64 attention over the units left at the
end, with the estimate of the others where a stage adds one. Selectors alone are held to their
formulas by the suites of their packages.
"""

from __future__ import annotations

import math
from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.test_matrix import CELLS, PARAMS, Run, lacking
from topkv.assembly.stages import Staged
from topkv.errors import ConfigError
from topkv_head_sparsity import reference as head_sparsity
from topkv_residual import reference as residual
from topkv_testing.integrity import check_integrity
from topkv_testing.oracle import attention
from topkv_testing.tiers import tier
from topkv_top_p import reference as top_p

PROMPT, STEPS, NEAR = 24, 2, 1e-4
STAGES = {
    "top_p": {"p": st.sampled_from([0.3, 0.7, 0.95, 1.0]), "widen": st.integers(1, 3)},
    "head_sparsity": {
        "threshold": st.sampled_from([0.2, 0.9, 1.0]),
        "head_budget": st.sampled_from([0.25, 0.6]),
    },
    "residual": {},
}
CHAINS = st.lists(
    st.sampled_from(list(STAGES)).flatmap(
        lambda name: st.fixed_dictionaries(
            {"name": st.just(name), "params": st.fixed_dictionaries(STAGES[name])}
        )
    ),
    min_size=1,
    max_size=3,
)
BAND = {torch.float32: 2e-4, torch.bfloat16: 3e-2}


def cells(algorithm, on):
    """Cells of the matrix for an algorithm over keys and values, with units that stay small."""
    return [
        cell
        for cell in CELLS
        if (cell.algorithm, cell.state, cell.attention) == (algorithm, "supported", "gqa")
        if on.name in cell.tiers and cell.unit <= 32 and not lacking(cell)
    ]


ALONE = {"trained_gate", "deepseek_dsa"}
"""Algorithms without stages behind them: their models select in prompts as well."""


def named(stages):
    return [stage["name"] for stage in stages]


class Chain(Run):
    """A request of a layer whose algorithm has stages behind it."""

    def __init__(self, cell, on, stages=(), wider=0):
        size = max(cell.unit, 4)
        params = {**(PARAMS.get(cell.algorithm) or {})}
        if cell.algorithm == "snapkv":
            params["generated"] = STEPS + 1
        budget = 5 * size + wider * cell.unit
        given = {"stages": list(stages), "budget": budget, "buffer": budget, "params": params}
        super().__init__(cell, on, PROMPT * size + STEPS, **given)
        self.forward(PROMPT * size, decode=False)

    @property
    def links(self):
        return getattr(self.coordinator.layers[0].algorithm, "links", [])

    def step(self):
        """Run a decode step: its output, and what each link was given and left, by lane."""
        (out,) = self.forward(1, decode=True)
        lanes = len(self.selected)
        given = [link.candidates.ids[:lanes].tolist() for link in self.refining]
        return out, [*given, self.selected]

    @property
    def refining(self):
        return [link for link in self.links if link.candidates is not None]

    def shares(self, lane, among):
        """float64 ``[h, n]``: the share of each unit for each query head of a lane, from keys in
        four bits."""
        unit, heads, size = self.sizes()
        keys = self.k[: self.length, lane * heads : (lane + 1) * heads]
        keys = top_p.decode(*top_p.encode(keys, 4), self.model.head_dim).double()
        q = self.q[self.length - 1, lane * size : (lane + 1) * size].double()
        logits = torch.einsum("kgd,tkd->kgt", q.unflatten(0, (heads, -1)), keys).flatten(0, 1)
        tokens = torch.tensor(among)[:, None] * unit + torch.arange(unit)
        return (logits * self.model.scale)[:, tokens].logsumexp(-1).softmax(-1)

    def sizes(self):
        """Tokens of a unit; kv-heads and query heads of a lane."""
        lanes, model = len(self.selected), self.model
        return (
            self.coordinator.lanes[0].group.unit,
            model.num_kv_heads // lanes,
            model.num_heads // lanes,
        )

    def modelled(self, estimated):
        """float64 ``[H, D]``: attention, with an estimate of all other closed units or without."""
        unit, heads, size = self.sizes()
        outs, closed = [], (self.length - 1) // unit
        for lane, ids in enumerate(self.selected):
            seen, kv = sorted(self.attended(ids)), slice(lane * heads, (lane + 1) * heads)
            q = self.q[self.length - 1, lane * size : (lane + 1) * size].double()
            args = self.k[seen, kv], self.v[seen, kv], self.model.scale
            out, lse = (part[0] for part in attention(q[None], *args))
            left = sorted({*range(closed)} - {*ids})
            if not estimated or not left:
                outs.append(out)
                continue
            tokens = torch.tensor(left)[:, None] * unit + torch.arange(unit)
            keys, values = (x[tokens][:, :, kv].double() for x in (self.k, self.v))
            by_head = q.unflatten(0, (heads, -1))
            mean = torch.einsum("kgd,ukd->kgu", by_head, keys.mean(1)) * self.model.scale
            logits = torch.cat(
                [lse.unflatten(0, (heads, -1))[..., None], mean + math.log(unit)], 2
            )
            shares = logits.softmax(-1)
            rest = torch.einsum("kgu,ukd->kgd", shares[..., 1:], values.mean(1))
            outs.append((shares[..., :1] * out.unflatten(0, (heads, -1)) + rest).flatten(0, 1))
        return torch.cat(outs)


def check_top_p(chain, lane, among, left, p, most):
    """Check that the first units by rank are left, enough for the share p of every head, or K."""
    share = chain.shares(lane, among)
    rank = dict(zip(among, share.amax(0).tolist(), strict=True))
    order = sorted(left, key=lambda unit: (-rank[unit], unit))
    dropped = [rank[unit] for unit in among if unit not in left]
    assert not dropped or max(dropped) <= rank[order[-1]] * (1 + NEAR)

    def least(units):
        return share[:, [among.index(unit) for unit in units]].sum(-1).min().item()

    full = min(most, len(among))
    assert len(left) == full if p == 1 else len(left) <= full
    assert len(left) == full or least(left) >= p - NEAR
    assert p == 1 or least(order[:-1]) < p + NEAR


def check_links(chain, passed):
    """Check the units that each stage leaves of its candidates."""
    for link, before, after in zip(chain.refining, passed, passed[1:], strict=False):
        most = link.group.select
        for lane, (given_, got) in enumerate(zip(before, after, strict=True)):
            among, left = ([unit for unit in each if unit >= 0] for each in (given_, got))
            assert {*left} <= {*among}
            assert len({*left}) == len(left) <= most
            if not among:
                continue
            if type(link.stage).__name__.startswith("TopP"):
                check_top_p(chain, lane, among, left, link.stage.p, most)
            else:  # all, or the part of a lane whose attention is flat
                assert len(left) in (min(most, len(among)), min(link.stage.few, len(among)))


def check_chain(cell, on, stages):
    """Check two steps; return False if the rules refuse this chain."""
    try:
        chain = Chain(cell, on, stages)
    except ConfigError as refused:
        reported = str(refused)
        assert any(name in reported for name in (*named(stages), "stage", cell.algorithm)), (
            reported
        )
        return False
    first, last = [*chain.refining, None][0], [None, *chain.refining][-1]
    alone = Chain(
        cell, on, wider=first.candidates.ids.shape[1] - last.group.select if first else 0
    )
    estimated = any(each["name"] == "residual" for each in stages)
    band = BAND[chain.model.dtype]
    for _ in range(STEPS):
        out, passed = chain.step()
        _, (offered,) = alone.step()
        for one, two in zip(passed[0], offered, strict=True):
            assert {*one} - {-1} == {*two} - {-1}
        check_links(chain, passed)
        expected = chain.modelled(estimated)
        torch.testing.assert_close(out.double(), expected, rtol=band, atol=band)
    for each in (chain, alone):
        check_integrity(each.coordinator)
        each.coordinator.close()
    return True


def check_chains(algorithm, on, most=25, phases=tuple(hypothesis.Phase)):
    """Check chains that are drawn; count those that are allowed by stage."""
    found, allowed = cells(algorithm, on), Counter()
    if not found:
        pytest.skip(f"{algorithm} has no such cell on {on.name}")

    @hypothesis.settings(max_examples=most, deadline=None, phases=phases)
    @given(cell=st.sampled_from(found), stages=CHAINS)
    def check(cell, stages):
        if check_chain(cell, on, stages):
            allowed.update({*named(stages)})

    check()
    return allowed


SELECTORS = sorted({cell.algorithm for cell in CELLS})


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("algorithm", SELECTORS)
def test_any_chain_decodes_as_its_model(algorithm, where):
    on = tier(where)
    if on.missing:
        pytest.skip(on.missing)
    allowed = check_chains(algorithm, on)
    assert allowed.keys() == (set() if algorithm in ALONE else STAGES.keys())


def narrow(self, layer, q, weights, out):
    """The selector offers no more than what is left at the end."""
    found = RETRIEVE(self, layer, q, weights, out)
    for link in self.links:
        if link.candidates is not None:
            link.candidates.ids[: len(out.ids), link.group.select :] = -1
    return found


def first_kept(worth, whole, few):
    """A flat lane keeps what comes first, one more than it may."""
    kept = torch.zeros(len(worth), worth.shape[-1], dtype=torch.bool)
    kept[:, : few + 1] = True
    return kept


KEPT, RETRIEVE = top_p.kept, Staged.retrieve_topk
BROKEN = {
    "p is not asked": (top_p, "kept", lambda worth, p, most: KEPT(worth, 1.0, most)),
    "the worst are kept": (top_p, "kept", lambda worth, p, most: KEPT(-worth, p, most)),
    "candidates are few": (Staged, "retrieve_topk", narrow),
    "a flat lane keeps more": (head_sparsity, "best", first_kept),
    "nothing is estimated": (residual, "add", lambda out, lse, *rest: (out.float(), lse)),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_chain_is_noticed(monkeypatch, what):
    monkeypatch.setattr(*BROKEN[what])
    with pytest.raises(AssertionError):
        check_chains("quest", tier("cpu"), 60, [hypothesis.Phase.generate])
