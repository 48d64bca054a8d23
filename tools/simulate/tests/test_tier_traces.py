"""Traces of requests by hand: what files may hold, and hits that are known."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv_prefixes.objects import HEADER
from topkv_simulate import asked as traces
from topkv_simulate.asked import BLOCK, DOES, Asked, AskedError, Setup, of_requests
from topkv_simulate.tier_bound import most_found
from topkv_simulate.tier_points import Speeds, max_tokens, points_of, recommend
from topkv_simulate.tiers import MOST_HOST_PAGES, Sizes, Tiers

SETUP = Setup(page_tokens=512, token_bytes=100)
PAGE = 512 * 100
STORED = PAGE + HEADER


def request(*blocks, tokens=None, answer=0):
    """Return a line of a file, as those of Mooncake."""
    tokens = len(blocks) * BLOCK if tokens is None else tokens
    reported = {"timestamp": 0, "input_length": tokens, "output_length": answer}
    return {**reported, "hash_ids": list(blocks)}


def found(lines, pages, objects=0, write="write_through", setup=SETUP, **sizes):
    """Return the tokens of each prompt that are in host memory and in the storage."""
    asked = of_requests(lines, setup)
    sizes = Sizes((pages + 1) * asked.page_bytes, objects * asked.object_bytes, write, **sizes)
    counts = Tiers(asked, sizes).run()
    return [*zip(counts.host, counts.stored, strict=True)]


def test_whole_pages_but_the_last_token_are_found():
    lines = [request(1, 2, 3), request(1, 2, 3), request(1, 2, 3, 4, tokens=1600)]
    assert found(lines, 8) == [(0, 0), (1024, 0), (1536, 0)]
    small = Setup(page_tokens=64, token_bytes=100)
    assert found(lines, 64, setup=small) == [(0, 0), (1472, 0), (1536, 0)]


def test_what_went_unused_longest_goes_first():
    a, b, c = request(1, 2), request(3, 4), request(5, 6)
    assert found([a, b, a, c, a, b], 4) == [(0, 0), (0, 0), (512, 0), (0, 0), (512, 0), (0, 0)]
    # The last page of a prompt goes before the first one.
    assert found([a, b, c, a, b], 5)[3:] == [(512, 0), (512, 0)]
    assert found([request(1, 2, 9), b, request(1, 7, 8)], 4)[2] == (512, 0)


def test_answers_take_pages_and_are_not_found():
    a, b = request(1, 2), request(3, 4, answer=3 * BLOCK)
    assert found([a, b, a], 7)[2] == (512, 0)
    assert found([a, b, a], 5)[2] == (0, 0)


def test_requests_that_run_hold_their_pages():
    lines = [request(1, 2), request(3, 4), request(1, 2), request(5, 6), request(1, 2)]
    two = Setup(512, 100, requests=2)
    assert found(lines, 4)[2:] == [(512, 0), (0, 0), (512, 0)]
    assert found(lines, 4, setup=two)[2:] == [(512, 0), (0, 0), (512, 0)]
    with pytest.raises(AskedError, match=r"host of 0\.0002048 GB: prompt 2 of the trace does not"):
        found(lines, 3, setup=two)
    with pytest.raises(AskedError, match="it holds no page"):
        found(lines, 0)


def test_a_storage_has_what_the_host_lets_go():
    a, b = request(1, 2, 3), request(4, 5, 6)
    lines = [a, b, a, b]
    assert found(lines, 3) == [(0, 0)] * 4
    assert found(lines, 3, 6)[2:] == [(0, 1024), (0, 1024)]
    assert found(lines, 3, 6, least_tokens=1025)[2:] == [(0, 0), (0, 0)]
    assert found(lines, 3, 6, "write_back")[2:] == [(0, 1024), (0, 1024)]
    # Nothing was seen twice before it is asked for again.
    assert found(lines, 3, 6, "write_through_selective")[2:] == [(0, 0), (0, 0)]
    assert found([*lines, a], 3, 6, "write_through_selective")[4] == (0, 1024)


def test_a_storage_makes_room_down_to_nine_tenths():
    """Ten pages fit: an eleventh leaves nine, and the last pages of the oldest prompt went."""
    prompts = [request(*range(10 * n, 10 * n + 4)) for n in range(3)]
    asked = of_requests(prompts, SETUP)
    tiers = Tiers(asked, Sizes(5 * PAGE, 10 * STORED))
    counts = tiers.run()
    assert (counts.written, counts.removed) == (12, 3)
    assert [page for _, page in tiers.storage.held] == [0, 7, 6, 5, 4, 11, 10, 9, 8]


def test_a_storage_keeps_what_was_read():
    """The first prompt was written first, and goes after the second one."""
    prompts = [request(*range(10 * n, 10 * n + 4)) for n in (0, 1, 0, 2)]
    tiers = Tiers(of_requests(prompts, SETUP), Sizes(5 * PAGE, 10 * STORED))
    assert tiers.run().stored == [0, 0, 1536, 0]
    assert [page for _, page in tiers.storage.held] == [5, 4, 2, 1, 0, 11, 10, 9, 8]


def test_token_ids_and_salts_keep_prompts_apart():
    ids = [*range(20)]
    lines = [{"token_ids": ids}, {"token_ids": ids}, {"token_ids": ids, "salt": "a tenant"}]
    lines += [{"token_ids": [*ids[:10], 99, *ids[11:]]}]
    setup = Setup(page_tokens=4, token_bytes=100)
    assert [host for host, _ in found(lines, 30, setup=setup)] == [0, 16, 0, 8]


def test_first_tokens_wait_for_bytes_and_for_what_is_computed():
    asked = of_requests([request(1, 2, 3), request(4, 5, 6), request(1, 2, 3)], SETUP)
    sizes = [Sizes(4 * PAGE), Sizes(4 * PAGE, 9 * STORED), Sizes(8 * PAGE)]
    alone, below, large = points_of(asked, sizes, Speeds(prefill=1000.0, read=0.001))
    assert alone.first_ms.tolist() == [1536.0] * 3
    read = 2 * STORED / 1e6 * 1e3
    assert below.first_ms.tolist() == pytest.approx([1536.0, 1536.0, read + 512.0])
    assert large.first_ms.tolist() == [1536.0, 1536.0, 512.0]
    assert (alone.most, below.most, large.most) == (1024, 1024, 1024)
    shown = below.as_dict()
    assert (shown["asked_tokens"], shown["host_tokens"], shown["storage_tokens"]) == (
        4608,
        0,
        1024,
    )
    assert shown["computed_tokens"] == 3584
    assert (shown["read_bytes"], shown["written_bytes"]) == (2 * STORED, 6 * STORED)
    assert shown["max_tokens"] == max_tokens(asked, 4 * PAGE) == 2 * 512
    assert recommend([alone, below, large], 0.02) is large
    assert recommend([alone, below, large], 0.05) is below
    assert recommend([alone, below, large], 0.50) is alone


USES = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=9)


def best_of(uses, room):
    """Return the most hits of asked pages, by trying whatever may be held after each use."""
    states = {frozenset(): 0}
    for page, asked in uses:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            hits += asked and page in held
            for size in range(room + 1):
                for kept in itertools.combinations(sorted({*held, page}), size):
                    kept = frozenset(kept)
                    after[kept] = max(after.get(kept, 0), hits)
        states = after
    return max(states.values())


@settings(max_examples=80)
@given(USES, st.integers(0, 3))
def test_the_bound_is_the_best_of_all_choices(uses, room):
    events = [
        (DOES.BEGIN, 0, 1, [page]) if asked else (DOES.PUBLISH, 0, [page]) for page, asked in uses
    ]
    asked = Asked(1, 1, 1, 1, 1, events)
    assert most_found(asked, [room]) == [best_of(uses, room)]


PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6)), max_size=40)


@given(
    PROMPTS,
    st.integers(7, 20),
    st.integers(0, 20),
    st.sampled_from(["write_through", "write_back"]),
)
def test_nothing_finds_more_than_the_bound(prompts, pages, objects, write):
    lines = [
        request(*([1, 2, 3][:turn] + [10 * other + at for at in range(6)])[:count])
        for turn, other, count in prompts
    ]
    asked = of_requests(lines, SETUP)
    if lines:
        counts = Tiers(asked, Sizes((pages + 1) * PAGE, objects * STORED, write)).run()
        (most,) = most_found(asked, [pages + objects])
        assert sum(counts.host) + sum(counts.stored) <= most


def test_files_are_read_as_they_are(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [request(7, 8, tokens=600, answer=5), {"token_ids": [1, 2, 3]}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    asked = Asked.load(path, SETUP)
    assert (asked.page_bytes, asked.object_bytes, asked.longest) == (PAGE, STORED, 605)
    assert [event[0] for event in asked.events] == [
        "begin",
        "lease",
        "publish",
        "lease",
        "shrink",
        "begin",
        "lease",
        "publish",
    ]
    assert asked.events[0] == (DOES.BEGIN, 0, 600, [0])


@pytest.mark.parametrize(
    ("lines", "reasons"),
    [
        ([], ["it is empty"]),
        (["{", "]"], ["line 1 is no JSON", "line 2 is no JSON"]),
        (["3", '{"input_length": 4}'], ["line 1: expected an object", "line 2: expected input"]),
        ([request(1, tokens=0)], ["line 1: expected input_length and hash_ids, or token_ids"]),
        ([request(1, tokens=1500)], ["line 1: 1500 tokens are 3 blocks of 512, got 1 hash_ids"]),
        ([{"token_ids": [1, -1]}, {"token_ids": []}], ["line 1: token_ids", "line 2: token_ids"]),
        ([{**request(1), "output_length": "4"}], ["line 1: output_length is '4'"]),
        ([{"format": "topkv requests", "version": 1}], ["it is of version 1, expected 2"]),
        ([{"format": "topkv requests", "version": 2}], ["it is not as it was written"]),
        ([request(1, tokens=9999)] * 20, ["line 1:", "and 12 more"]),
    ],
    ids=str,
)  # fmt: skip
def test_files_that_are_none_are_refused_with_every_line(tmp_path, lines, reasons):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    with pytest.raises(AskedError, match="is no trace of requests") as refused:
        Asked.load(path, SETUP)
    reported = "\n".join(refused.value.reasons)
    assert all(reason in reported for reason in reasons), reported
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(AskedError, match="no text"):
        Asked.load(path, SETUP)


def test_a_recorded_trace_is_read_as_it_was_written_and_not_otherwise(tmp_path):
    path = tmp_path / "trace.jsonl"
    asked = of_requests([request(1, 2), request(1, 3)], SETUP)
    asked.save(path)
    read = Asked.load(path, Setup())
    assert (read.slots, read.longest, len(read.events)) == (asked.slots, 1024, len(asked.events))
    written = path.read_text()
    for was, now in (
        ('"slots": 1', '"slots": 2'),
        ("[0, 1]", "[0, 2]"),
        ('["shrink", 0, 0]\n', ""),
    ):
        assert was in written
        path.write_text(written.replace(was, now, 1))
        with pytest.raises(AskedError, match="it is not as it was written"):
            Asked.load(path, Setup())


def test_pages_that_do_not_divide_a_block_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(request(1)))
    with pytest.raises(
        AskedError, match="a block of 512 tokens must be whole pages, got pages of 48"
    ):
        Asked.load(path, Setup(page_tokens=48))


def test_a_line_of_any_depth_is_refused(tmp_path):
    """Each gives one short reason, also one that is not too deep to read."""
    path = tmp_path / "deep"
    for depth in (*range(5, 100, 30), *range(900, 1010), 100_000):
        path.write_text(json.dumps(request(1)) + "\n" + "[" * depth + "]" * depth + "\n")
        with pytest.raises(AskedError) as reported:
            Asked.load(path, SETUP)
        (reason,) = reported.value.reasons
        assert reason.startswith("line 2")
        assert len(reason) < 200


def test_a_text_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(traces, "LONGEST_LINE", 1000)
    with pytest.raises(AskedError, match="line 1 has more than 1000 characters"):
        Asked.load(Path("/dev/zero"), SETUP)


def test_a_pipe_is_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = Thread(target=lambda: path.write_text(json.dumps(request(1, 2)) + "\n"))
    writer.start()
    assert len(Asked.load(path, SETUP).events) > 2
    writer.join()


def test_a_pool_of_more_pages_than_can_be_listed_is_refused():
    asked = of_requests([request(1)], SETUP)
    host = (MOST_HOST_PAGES + 1) * asked.page_bytes
    with pytest.raises(AskedError, match=r"too large to replay.*\n.*take less, or larger pages"):
        Tiers(asked, Sizes(host))
