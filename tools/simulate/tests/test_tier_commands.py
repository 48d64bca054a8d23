"""``topkv tiers`` as a user calls it, on what a model asked for and on a file of requests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from topkv import attach
from topkv_cli.group import topkv
from topkv_simulate.asked import Asked, Setup
from topkv_simulate.asking import asking
from topkv_simulate.tiers import Sizes, Tiers

pytest.importorskip("topkv_quest")
pytest.importorskip("topkv_triton_attention")
pytest.importorskip("topkv_files")

SPEEDS = ("--prefill-rate", 1000, "--read-gbs", 0.5)


def call(*args):
    return CliRunner().invoke(topkv, ["tiers", *map(str, args)])


def refused(done, *words):
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    """Two prompts that come again, and one between."""
    path = tmp_path_factory.mktemp("traces") / "requests.jsonl"
    reported = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [7, 8], [4, 5, 6]]
    lines = [
        {"timestamp": at, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids}
        for at, ids in enumerate(reported)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_what_generate_finds_is_replayed(tmp_path):
    """Turns of two chats and a batch, in a pool that is too small, over files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 64}
    shape = LlamaConfig(num_hidden_layers=2, vocab_size=64, max_position_embeddings=512, **sizes)
    model = LlamaForCausalLM(shape).eval()
    config = {
        "algorithm": "quest",
        "backend": "triton_attention",
        "budget": 64,
        "dense_layers": [],
        "max_requests": 2,
        "max_tokens": 208,
        "page_tokens": 16,
    }
    storage = {
        "name": "files",
        "params": {"path": str(tmp_path / "pages"), "limit": "1GiB", "sync": False},
        "least_tokens": 16,
        "fetch": "wait_complete",
    }
    config["pages"] = {"name": "prefixes", "params": {"keep": "all", "storage": storage}}
    with attach(model, config, engine="transformers") as handle:
        storage = handle.coordinator.keeper.storage
        with asking(handle.coordinator) as recorder:
            chats = list(torch.randint(3, 64, (2, 1, 90)))
            for turn in range(3):
                for at, said in enumerate(chats):
                    ids = torch.cat([said, torch.full((1, 11 + at), turn + 3)], 1)
                    mask = torch.ones_like(ids)
                    options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
                    chats[at] = model.generate(ids, attention_mask=mask, **options)
                    storage.wait()
            handle.prefixes.forget()  # what is in host memory
            both = torch.cat([chats[0][:, :96], chats[0][:, :48].repeat(1, 2)])
            mask = torch.ones_like(both)
            model.generate(both, attention_mask=mask, **options)
            storage.wait()
        counts = handle.prefixes.counts
        pages = handle.coordinator.manager.host.num_pages
        recorder.save(tmp_path / "trace.jsonl")
    asked = Asked.load(tmp_path / "trace.jsonl", Setup())
    found = Tiers(asked, Sizes(pages * asked.page_bytes, 2**30, least_tokens=16)).run()
    reported = sum(found.asked), sum(found.host) + sum(found.stored), found.fetched, found.evicted
    below = counts.storage
    assert reported == (counts.asked, counts.found, below.fetched, counts.evicted)
    assert found.written == below.stored
    assert all(reported), "nothing was found, fetched or evicted"


def test_json_has_every_point_and_what_suffices(requests):
    sizes = ("--host-gb", "0.6,0.34", "--storage-gb", "0,2", "--write", "write_through,write_back")
    done = call(requests, *sizes, *SPEEDS, "--within", 15, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert shown["trace"] == {
        "prompts": 5,
        "tokens": 7168,
        "page_tokens": 512,
        "page_bytes": 2**26,
        "object_bytes": 2**26 + 4096,
        "slots": 1,
    }
    points = {
        (each["host_bytes"], each["storage_bytes"], each["write"]): each
        for each in shown["points"]
    }
    assert [*points] == [
        (340000000, 0, "write_through"),
        (340000000, 2000000000, "write_through"),
        (340000000, 2000000000, "write_back"),
        (600000000, 0, "write_through"),
        (600000000, 2000000000, "write_through"),
        (600000000, 2000000000, "write_back"),
    ]
    for each in points.values():
        found = each["host_tokens"] + each["storage_tokens"]
        assert found + each["computed_tokens"] == each["asked_tokens"] == 7168
        assert found <= each["most_tokens"]
        read = each["storage_tokens"] // 512 * (2**26 + 4096) / 0.5e9
        first = 1e3 * (read + each["computed_tokens"] / 1000) / 5
        assert each["first_token_ms"] == pytest.approx(first)
    small, stored = (points[340000000, size, "write_through"] for size in (0, 2000000000))
    assert (small["host_tokens"], stored["storage_tokens"]) == (0, 2048)
    assert points[600000000, 0, "write_through"]["host_tokens"] > 0
    assert shown["recommended"] == stored


def test_the_table_says_what_it_is(requests, tmp_path):
    sizes = ("--host-gb", "0.34,0.6", "--storage-gb", "0,2")
    for name in ("tiers.png", "tiers.svg"):
        done = call(requests, *sizes, *SPEEDS, "--within", 15, "--plot", tmp_path / name)
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).stat().st_size > 5000
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["host", "GB", "storage", "GB"]
    rows = [line.split() for line in lines[1:5]]
    assert [row[:2] for row in rows] == [["0.34", "0"], ["0.34", "2"], ["0.6", "0"], ["0.6", "2"]]
    assert "5 prompts of 7168 tokens, pages of 512, at most 1 at a time" in done.stdout
    assert "1433.6 ms if nothing is found" in done.stdout
    assert "takes 262.2 us at 0.5 GB/s, a computed one 1000.0: fetching pays" in done.stdout
    assert "recommended: host 0.34 GB (max_tokens 1536), storage 2 GB, write" in done.stdout
    slow = call(requests, *sizes, "--prefill-rate", 10000, "--read-gbs", 0.5).stdout
    assert "fetching does not pay" in slow
    alone = call(requests, "--host-gb", "0.6", "--prefill-rate", 1000).stdout
    assert "recommended: host 0.6 GB (max_tokens 3072), no storage" in alone
    assert "us at" not in alone


def test_what_cannot_be_done_is_refused(requests, tmp_path):
    rate = ("--prefill-rate", 1000)
    refused(call(tmp_path / "absent", "--host-gb", 1, *rate), "No such file")
    refused(call(requests, "--host-gb", "1,big", *rate), "expected GB such as 16,32")
    refused(call(requests, "--host-gb", "-1", *rate), "expected GB such as 16,32")
    refused(call(requests, "--host-gb", 1), "--prefill-rate")
    refused(call(requests, "--host-gb", 1, "--storage-gb", 1, *rate), "--read-gbs is missing")
    refused(call(requests, "--host-gb", 1, *rate, "--write", "behind"), "expected some of write_")
    refused(call(requests, "--host-gb", 1, *rate, "--page-tokens", 500), "must be whole pages")
    refused(call(requests, "--host-gb", 1, *rate, "--plot", tmp_path / "a.doc"), "ends in one of")
    for value in ("nan", "inf", "-inf", "0", "much"):
        refused(call(requests, "--host-gb", 1, "--prefill-rate", value), "--prefill-rate")
        refused(call(requests, "--host-gb", 1, *rate, "--read-gbs", value), "--read-gbs")
    for value in ("nan", "inf", "1e300", "1,nan"):
        refused(call(requests, "--host-gb", value, *rate), "expected GB such as 16,32")
    refused(call(requests, "--host-gb", 1, *rate, "--within", "nan"), "'nan' is not finite")
    done = call(requests, "--host-gb", "0.1,0.2,9", *rate)
    refused(done, "host of 0.1 GB: it holds no page", "host of 0.2 GB: prompt 1 of the trace")
    (tmp_path / "long").write_text(json.dumps({"token_ids": [1], "output_length": 2**62}) + "\n")
    refused(call(tmp_path / "long", "--host-gb", 1, *rate), "prompt 1 of the trace does not fit")
    trace = tmp_path / "empty.jsonl"
    Asked(4, 2**20, 2**20, 2**60, 8, [("begin", 0, 8, [])]).save(trace)
    refused(call(trace, "--host-gb", 1, *rate), "of 8 tokens are more than can be listed")
    Asked(4, 2**20, 2**20, 1, 8, [("forget", 0)]).save(trace)
    refused(call(trace, "--host-gb", 1, *rate), "no prompt begins")


def test_the_module_of_the_command_imports_nothing_heavy():
    code = "import sys, topkv_simulate.tier_commands"
    heavy = "; print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
