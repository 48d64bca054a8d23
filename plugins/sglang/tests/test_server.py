"""SGLang's server, started by its own command line, and its metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from plugins.sglang.tests.conftest import CHUNK, LONGEST, PAGE

SETTINGS = {"algorithm": "quest", "budget": 128, "buffer": 128, "dense_layers": []}


def ask(url, body=None):
    """The answer to a request."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return answer.read().decode()


def command(model, port):
    """The command line of the README, with options of a CPU."""
    override = json.dumps({"topkv_settings": {**SETTINGS, "max_tokens": 4 * LONGEST}})
    words = ["--attention-backend", "topkv", "--page-size", PAGE, "--max-running-requests", 4]
    words += ["--json-model-override-args", override, "--context-length", LONGEST]
    words += ["--chunked-prefill-size", CHUNK, "--skip-tokenizer-init", "--disable-cuda-graph"]
    words += ["--device", "cpu", "--dtype", "float32", "--enable-metrics", "--port", port]
    line = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *words]
    return [*map(str, line), "--skip-server-warmup"]


@pytest.fixture(scope="module")
def url(needs_sglang, environment, model, tmp_path_factory):
    """Address of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command(model, port), env=environment, stdout=out, stderr=out, start_new_session=True
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 400
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            ask(f"{url}/health")
            break
        except OSError:
            time.sleep(0.5)
    yield url
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def metrics(url):
    """Values of topkv's metrics, by name."""
    lines = [
        line for line in ask(f"{url}/metrics").splitlines() if line.startswith("sglang:topkv")
    ]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def generate(url, prompt, **options):
    """Return what a server generates."""
    how = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, **options}
    return json.loads(ask(f"{url}/generate", {"input_ids": prompt, "sampling_params": how}))


def test_a_server_answers_and_counts(url, stock, prompt):
    """Short requests have the tokens of stock SGLang; a long one loads, which is counted."""
    short = prompt(97, 40)
    assert [generate(url, short)["output_ids"]] == stock.answer([short], 16)
    assert len(generate(url, prompt(400, 41))["output_ids"]) == 16
    time.sleep(2)  # it is idle by then
    state = json.loads(ask(f"{url}/server_info"))["internal_states"][0]["topkv"]
    shown = metrics(url)
    assert shown["sglang:topkv_hits_total"] == state["hits"] > 0
    assert shown["sglang:topkv_misses_total"] == state["misses"] > 0
    assert shown["sglang:topkv_loaded_bytes_total"] == state["loaded_bytes"] > 0
    assert shown["sglang:topkv_pages"] == state["pages"]
    assert shown["sglang:topkv_used_pages"] == state["used_pages"] == state["requests"] == 0


def test_beams_are_refused_and_others_go_on(url, stock, prompt):
    with pytest.raises(OSError, match="400"):
        generate(url, prompt(20, 42), beam_width=2, n=2)
    short = prompt(60, 43)
    assert [generate(url, short)["output_ids"]] == stock.answer([short], 16)
