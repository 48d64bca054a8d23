"""What pages are worth, and which ones a long answer keeps."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plugins.triattention.tests.making import by_tokens, made
from plugins.triattention.tests.test_conformance import ENTRY, QUERIES
from topkv.errors import ConfigError
from topkv.hooks.stage import StageSetup
from topkv.testing.algorithm.bench import AlgorithmBench
from topkv.testing.algorithm.case import Case
from topkv.testing.kit import examples, subject_of
from topkv.testing.machines.dropping import Lives
from topkv.testing.machines.lifecycle_model import HEADS, KV_HEADS, LAYERS, doubles
from topkv.testing.models.stage_doubles import EVERYTHING
from topkv.testing.stage.keep import worth
from topkv.testing.strategies import Geometry
from topkv.testing.tiers import tier
from topkv_triattention.calibration import LayerQueries, write
from topkv_triattention.stage import TriAttention


def turned(known, keys, positions, factor):
    """Post-RoPE keys, fp32 of float64 arithmetic."""
    result = torch.empty_like(keys)
    for (a, b), omega in zip(known.pairs, known.frequencies, strict=True):
        angles = torch.tensor([omega * position for position in positions]).double()[:, None]
        result[..., a] = keys[..., a] * angles.cos() - keys[..., b] * angles.sin()
        result[..., b] = keys[..., a] * angles.sin() + keys[..., b] * angles.cos()
    return (factor * result).float()


def with_factor(known, factor):
    """The same queries, as they come out of RoPE with a factor."""
    mean, size = ([[factor * x for x in row] for row in each] for each in (known.mean, known.size))
    return LayerQueries(known.pairs, known.frequencies, mean, size)


@st.composite
def shapes(draw):
    """kv-heads, heads of each, channels and how many of them RoPE turns."""
    dim = draw(st.sampled_from([4, 12, 16]))
    turns = draw(st.integers(0, dim // 2).map(lambda pairs: 2 * pairs))
    return draw(st.sampled_from([(2, 2), (1, 3), (2, 1)])), dim, turns


@pytest.mark.parametrize("scope", ["kv_head", "shared"])
def test_pages_are_worth_what_the_formula_says(scope, on):
    """Of tokens at the positions that they had when they came, some of which went since."""

    @examples(on, cpu=30, interpret=8, gpu=10)
    @given(
        data=st.data(), shape=shapes(), halves=st.booleans(),
        seed=st.integers(0, 99), factor=st.sampled_from([1.0, 1.5]),
    )  # fmt: skip
    def check(data, shape, halves, seed, factor):
        (kv_heads, group), dim, turns = shape
        known = made(seed, kv_heads * group, dim, turns, halves)
        geometry = Geometry(kv_heads, group, dim, 4, 2, scope, torch.float32)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "queries.json"
            write(path, {0: with_factor(known, factor)})
            params = {"calibration": str(path)}
            case = Case(
                geometry, params, 3, 2, "normal", seed, 12, float("nan"), exact=False
            )  # fmt: skip
            bench = AlgorithmBench(subject_of(ENTRY, "stage", on), case)
        page = bench.group.page_tokens
        # Of two pages one lies above the mean and one below, whatever they are worth.
        length = data.draw(bench.lengths(case.most, 3 * page), "length")
        # So many pages had gone before each page that is left, and the open one.
        pages = -(-length // page)
        went = data.draw(st.lists(st.integers(0, 900), min_size=pages, max_size=pages), "went")
        gone = [page * sum(went[: at // page + 1]) for at in range(length)]
        positions = [at + before for at, before in enumerate(gone)]
        plain = case.tokens(1)[:length].double()
        keys = turned(known, plain, positions, factor)
        prompt = length - data.draw(st.sampled_from([0, 1, 3]), "decoded")
        bench.prefill(1, keys[:prompt])
        for key in keys[prompt:]:
            bench.append([1], key[None])
        whole = length // page * page
        t = positions[-1] + 1
        expected, slack = by_tokens(
            known, plain[:whole], positions[:whole], t, page, bench.group.lane_heads, factor
        )
        got = worth(bench, 1, t - length).double()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 + 2e-6 * slack)

    check()


def test_keys_of_any_size_have_a_score(on):
    """Squares of them would overflow, or vanish; of float16, so would sizes of pairs."""
    for dtype, size in ((torch.float32, 1e25), (torch.float32, 1e-25), (torch.float16, 65504.0)):
        geometry = Geometry(2, 2, 12, 4, 2, "kv_head", dtype)
        params = {"calibration": str(QUERIES)}
        case = Case(geometry, params, 3, 2, "normal", 1, 12, float("nan"), exact=False)
        bench = AlgorithmBench(subject_of(ENTRY, "stage", on), case)
        keys = case.tokens(1)[:20].float()
        bench.prefill(1, (keys.sign() * size).to(dtype))
        scores = worth(bench, 1)
        assert scores.isfinite().all()
        assert scores.std() > 0.1, f"{dtype} of {size}: {scores}"


def test_pages_that_queries_look_at_outlive_a_long_answer(tmp_path):
    """One page of ten of a prompt has keys that queries like; it is neither first nor recent."""
    looked_at = [0.0, 0.0, 3.0, 1.0]
    queries = LayerQueries(
        [[0, 1], [2, 3]], [1.0, 0.0], [looked_at] * HEADS, [[0.1, 10**0.5]] * HEADS
    )
    write(tmp_path / "queries.json", dict.fromkeys(range(LAYERS), queries))
    params = {"tokens": 16, "every": 5, "first": 0, "recent": 4}
    params["calibration"] = str(tmp_path / "queries.json")
    stages = [{"name": "triattention", "params": params}]
    lives = Lives(tier("cpu"), registry=doubles(EVERYTHING, ENTRY), stages=stages)
    coordinator, slot = lives.coordinator, lives.coordinator.request_begin()

    def forward(rows, **how):
        coordinator.forward_begin(**how)
        q = torch.randn(len(rows), HEADS, 4)
        for layer in range(LAYERS):
            coordinator.attention(layer, q, rows, rows)
        coordinator.forward_end()

    prompt = 0.3 * torch.randn(40, KV_HEADS, 4)
    prompt[20:24] += torch.tensor(looked_at)
    forward(prompt, prefill=[(slot, 40)])
    page = coordinator.requests.pages.of(slot)[5]
    for _ in range(60):
        forward(0.3 * torch.randn(1, KV_HEADS, 4), decode=[slot])
        assert page in coordinator.requests.pages.of(slot)
        assert coordinator.manager.host.used <= 6
    assert coordinator.requests.dropped[slot] >= 40 + 60 - 21
    coordinator.close()


def refused(**params):
    case = Case(
        Geometry(2, 2, 12, 4, 2, "kv_head", torch.float32),
        {"calibration": str(QUERIES)}, 3, 2, "normal", 1, 12, float("nan"), exact=False,
    )  # fmt: skip
    bench = AlgorithmBench(subject_of(ENTRY, "stage", tier("cpu")), case)
    setup = StageSetup(bench.model, bench.group, {**ENTRY.parameters, **params}, bench.device)
    with pytest.raises(ConfigError) as caught:
        TriAttention(setup)
    return [*caught.value.reasons]


def test_wrong_parameters_are_refused_together():
    assert refused(tokens=0, every=True, first=-1, recent=1.5) == [
        "tokens must be an integer of 1 or more, got 0",
        "every must be an integer of 1 or more, got True",
        "first must be an integer of 0 or more, got -1",
        "recent must be an integer of 0 or more, got 1.5",
        "calibration must be the path of a file, got None; make one with "
        "'python -m topkv_triattention.collect'",
    ]


def test_a_file_that_is_none_is_refused_with_its_name(tmp_path):
    path = str(tmp_path / "none.json")
    (reason,) = refused(calibration=path)
    assert reason.startswith(f"calibration file {path!r}: cannot be read")
