"""Decodes through a configuration: selection, plan, and what attention leaves out, in float64.

The model of a step knows the selection, which the algorithm wrote down, and the rule.
"""

from __future__ import annotations

import pytest
import torch

from plugins.triton_attention.tests.skip_cases import NEAR, kept
from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.errors import ConfigError
from topkv.plugins import registry
from topkv.types import ModelShape
from topkv_testing.models.oracle import attention
from topkv_testing.tiers import all_tiers, tier
from topkv_testing.tolerance import assert_as_good

HEADS, KV_HEADS, DIM, PROMPT, STEPS = 4, 2, 64, 297, 3
MODEL = ModelShape(2, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
FACTOR = 120.0
EPS = torch.finfo(torch.float32).eps

SELECTORS = {
    "quest": {},
    "quest, shared": {"scope": "shared"},
    "quest, narrow": {"budget": 112},
    "quest and top_p": {"stages": [{"name": "top_p", "params": {"p": 0.9}}]},
    "streaming_llm": {"algorithm": "streaming_llm"},
    "pariskv": {"algorithm": "pariskv", "unit": 1, "budget": 257},
    "pariskv, regranulated": {
        "algorithm": "pariskv",
        "stages": ["regranulate"],
        "buffer": 4176,
    },
}
"""Settings by what is to be seen of them."""


@pytest.fixture(
    params=[
        pytest.param(each, id=each.name, marks=[pytest.mark.gpu] * (each.name == "gpu"))
        for each in all_tiers()
    ]
)
def on(request):
    if request.param.missing:
        pytest.skip(f"tier {request.param.name!r}: {request.param.missing}")
    return request.param


def configured(on, backend="triton_attention", factor=FACTOR, **options):
    """A dense layer and a sparse one, the stage before those that options name."""
    ours = [{"name": "skip_softmax", "params": {"factor": factor}}] if factor else []
    settings = {
        "algorithm": "quest",
        "backend": backend,
        "topk": "radix",
        "impl": on.impl,
        "unit": 16,
        "budget": 272,
        "page_tokens": 64,
        "max_requests": 2,
        "max_tokens": 1024,
        "dense_layers": [0],
        "poison": True,
        **options,
        "stages": [*ours, *options.get("stages", [])],
    }
    return lower(SparseConfig(**settings), MODEL, device=on.device, registry=registry())


class Run:
    """Two requests of unequal length, and every token that they were given, on the CPU.

    Attributes:
        left_out: blocks so far, by the rule.
        closest: margin of the closest vote so far.
    """

    def __init__(self, on, options):
        self.on, self.left_out, self.closest, self.tokens = on, 0, 1.0, []
        self.coordinator = SparseCoordinator(configured(on, **options), registry())
        random = torch.Generator().manual_seed(5)
        self.slots = [self.coordinator.request_begin() for _ in range(2)]
        for length in (PROMPT, PROMPT // 2):
            q = 3 * torch.randn(2, length + STEPS, HEADS, DIM, generator=random)
            k, v = torch.randn(2, 2, length + STEPS, KV_HEADS, DIM, generator=random)
            # Runs of 64 keys that are small, as those of text that no query asks for.
            size = torch.tensor([1.0, 0.2, 1.0, 0.1, 0.3])
            k = k * size.repeat_interleave(64)[: length + STEPS, None, None]
            self.tokens.append([q, k, v])
        self.lengths = [0, 0]

    def forward(self, counts, decode=False):
        """out ``[layers, rows, H, D]`` of that many tokens of each request, on the CPU."""
        asked = list(zip(self.slots, counts, strict=True))
        self.coordinator.forward_begin(
            **({"decode": self.slots} if decode else {"prefill": asked})
        )
        outs = []
        for layer in range(2):
            rows = [
                torch.cat(
                    [
                        x[layer, a : a + n]
                        for x, a, n in zip(each, self.lengths, counts, strict=True)
                    ]
                )
                for each in zip(*self.tokens, strict=True)
            ]
            rows = [x.to(self.on.device) for x in rows]
            outs.append(self.coordinator.attention(layer, *rows).cpu())
        self.coordinator.forward_end()
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]
        return torch.stack(outs)

    def verify(self, counts, most):
        """out ``[layers, rows * most, H, D]`` of a step of several tokens, padding of NaN."""
        self.coordinator.forward_begin(self.slots, append=counts, queries=most)
        outs = []
        for layer in range(2):
            rows = []
            for each in zip(*self.tokens, strict=True):
                parts = []
                for x, first, count in zip(each, self.lengths, counts, strict=True):
                    new = x[layer, first : first + count]
                    padding = new.new_full((most - count, *new.shape[1:]), torch.nan)
                    parts += [new, padding]
                rows.append(torch.cat(parts).to(self.on.device))
            outs.append(self.coordinator.attention(layer, *rows).cpu())
        self.coordinator.forward_end()
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]
        return torch.stack(outs)

    def listed(self, row, lane, count=1):
        """Tokens in the order of the page table, of a row that has appended ``count``."""
        group = self.coordinator.lanes[1].group
        ids = self.coordinator.lanes[1].selection.ids[row * group.lane_heads + lane].tolist()
        closed = (self.lengths[row] - count) // group.unit
        units = [unit for unit in dict.fromkeys(ids) if 0 <= unit < closed]
        tokens = [unit * group.unit + i for unit in units for i in range(group.unit)]
        return [*tokens, *range(closed * group.unit, self.lengths[row])]

    def blocks(self):
        """Keys of a block and splits, as the backend of this run has them."""
        tables = self.coordinator.lanes[1].tables.table
        unit = self.coordinator.lanes[1].group.unit
        if self.on.impl == "reference":
            return 64, 1
        from topkv_triton_attention.launch import decode_launch, processors_of, split_count

        launch = decode_launch(DIM, unit, 4)
        slots = processors_of(self.on.device) * launch.resident
        programs = 2 * KV_HEADS
        return launch.block, split_count(programs, tables.shape[1] * unit, slots, launch.block)

    def check(self, out, factor, counts=(1, 1), most=1):
        """The sparse layer's rows of a step, each with ``most`` queries, of which ``counts`` are
        no padding."""
        block, splits = self.blocks()
        lanes = self.coordinator.lanes[1].group.lane_heads
        for row, length in enumerate(self.lengths):
            count = counts[row]
            q, k, v = (x[1] for x in self.tokens[row])
            assert not out[1, row * most + count : row * most + most].any()
            for head in range(KV_HEADS):
                tokens = self.listed(row, head * lanes // KV_HEADS, count)
                queries = q[length - count : length].unflatten(1, (KV_HEADS, -1))[:, head]
                keys, values = k[tokens, head], v[tokens, head]
                threshold = min(1.0, factor / length)
                sight = len(tokens) - torch.arange(count - 1, -1, -1)
                found = kept(
                    *(queries.flatten(0, 1), keys, threshold, splits, block, MODEL.scale),
                    sight.repeat_interleave(queries.shape[1]),
                )
                self.closest = min(self.closest, found.margin)
                self.left_out += sum(found.skipped)
                heads = slice(head * 2, head * 2 + 2)
                for nth, query in enumerate(queries):
                    left = found.tokens & (torch.arange(len(tokens)) < sight[nth])
                    pair = (x[left][:, None] for x in (keys, values))
                    truth = attention(query[None], *pair, MODEL.scale)[0][0]
                    rough = (query @ keys[left].T * MODEL.scale).softmax(-1) @ values[left]
                    # What a few roundings of the largest logit move the result by, as in the kit.
                    furthest = float((query.abs() @ keys[left].abs().T).max() * MODEL.scale)
                    slack = 16 * EPS * furthest * float(values[left].abs().max())
                    what = f"row {row}, kv-head {head}, query {nth}"
                    assert_as_good(out[1, row * most + nth, heads], truth, rough, what, slack)

    def dense(self, layer, row, rows):
        """float64 attention of the last ``rows`` tokens over all that they see."""
        q, k, v = (x[layer, : self.lengths[row]] for x in self.tokens[row])
        first = self.lengths[row] - rows
        seen = torch.arange(len(k)) <= first + torch.arange(rows)[:, None]
        return attention(q[first:], k, v, MODEL.scale, seen)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_step_attends_to_what_is_left_of_its_selection(on, selector):
    """Prompts and the dense layer stay exact."""
    run = Run(on, SELECTORS[selector])
    out = run.forward([PROMPT, PROMPT // 2])
    for layer in range(2):
        first, second = (run.dense(layer, row, run.lengths[row]) for row in range(2))
        torch.testing.assert_close(
            out[layer].double(), torch.cat([first, second]), rtol=0, atol=1e-4
        )
    for _ in range(STEPS):
        out = run.forward([1, 1], decode=True)
        run.check(out, FACTOR)
        exact = torch.cat([run.dense(0, row, 1) for row in range(2)])
        torch.testing.assert_close(out[0].double(), exact, rtol=0, atol=1e-4)
    assert run.closest > NEAR, "a vote is too close to be judged: take another seed"
    assert run.left_out > 3, "nothing is left out, so nothing is shown"
    run.coordinator.close()


@pytest.mark.parametrize("selector", ["quest", "quest, shared"])
def test_queries_of_a_row_vote_together(on, selector):
    """Rows verify drafts, of unequal number, and take some of them back."""
    run = Run(on, {**SELECTORS[selector], "max_queries": STEPS})
    run.forward([PROMPT, PROMPT // 2])
    for counts in ([3, 2], [1, 3], [2, 1]):
        out = run.verify(counts, STEPS)
        run.check(out, FACTOR, counts, STEPS)
        run.lengths = [length - count for length, count in zip(run.lengths, counts, strict=True)]
        run.coordinator.rollback(run.slots, run.lengths)
    assert run.closest > NEAR, "a vote is too close to be judged: take another seed"
    assert run.left_out > 3, "nothing is left out, so nothing is shown"
    run.coordinator.close()


def outputs(on, factor, **options):
    run = Run(on, {"factor": factor, **options})
    run.forward([PROMPT, PROMPT // 2])
    outs = torch.stack([run.forward([1, 1], decode=True) for _ in range(STEPS)])
    counts = run.coordinator.transfers_of()
    run.coordinator.close()
    return outs, counts


def test_a_factor_that_leaves_nothing_out_changes_no_bit(on):
    """A larger factor does not change what is selected and loaded either."""
    (plain, counts), (same, again), (other, third) = (
        outputs(on, factor, budget=112) for factor in (None, 1e-200, FACTOR)
    )
    assert torch.equal(plain, same)
    assert not torch.equal(plain, other)
    assert counts == again == third
    assert counts.misses > 0


def test_padded_rows_give_nothing_and_disturb_nothing(on):
    run = Run(on, {})
    run.forward([PROMPT, PROMPT // 2])
    c, alone = run.coordinator, run.forward([1, 1], decode=True)
    for slot, length in zip(run.slots, run.lengths, strict=True):
        c.truncate(slot, length - 1)
    run.lengths = [length - 1 for length in run.lengths]
    c.forward_begin([run.slots[1], -1])
    for layer in range(2):
        rows = [x[layer, run.lengths[1]] for x in run.tokens[1]]
        rows = [torch.stack([x, torch.full_like(x, torch.nan)]).to(on.device) for x in rows]
        out = c.attention(layer, *rows).cpu()
        assert torch.equal(out[0], alone[layer, 1])
        assert not out[1].any()
    c.forward_end()
    c.close()


@pytest.mark.parametrize("backend", ["flash_attention", "flashinfer"])
def test_backends_without_the_option_are_refused_by_name(backend):
    with pytest.raises(ConfigError) as error:
        configured(tier("cpu"), backend, budget=1)
    reported = "\n".join(error.value.reasons)
    assert (
        f"(backend '{backend}') has no skip_softmax, which stage 'skip_softmax' asks of "
        "attention: choose another backend, or leave the stage out (layers 1, sparse)"
    ) in reported
    assert "budget must be at least" in reported
    assert "(layers 0" not in "\n".join(why for why in error.value.reasons if "skip" in why)
