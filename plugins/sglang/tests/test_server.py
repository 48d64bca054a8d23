"""SGLang's server, started by its own command line, and its metrics."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from plugins.sglang.tests.conftest import CHUNK, DEVICE, LONGEST, PAGE, VOCABULARY

SETTINGS = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "buffer": 128}
SETTINGS |= {"dense_layers": [], "max_tokens": 4 * LONGEST}

FIRST = ord("\u4e00")
"""Letter of token 0; those that follow it are none of a combination."""


def ask(url, body=None):
    """The answer to a request."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return answer.read().decode()


def options(port):
    """Options of the README's command, and those of the device."""
    words = ["--max-running-requests", 4, "--page-size", PAGE, "--context-length", LONGEST]
    words += ["--chunked-prefill-size", CHUNK, "--device", DEVICE]
    words += ["--disable-cuda-graph"] if DEVICE == "cpu" else ["--mem-fraction-static", 0.06]
    words += ["--sampling-backend", "pytorch"]
    words += ["--dtype", "float32", "--served-model-name", "tiny", "--enable-metrics"]
    return [*map(str, words), "--port", str(port), "--skip-server-warmup"]


def command(model, port):
    """The command line that starts the server."""
    ours = [f"--set={name}={json.dumps(value)}" for name, value in SETTINGS.items()]
    line = [sys.executable, "-m", "topkv_cli", "serve", str(model), "--engine", "sglang", *ours]
    return [*line, *options(port)]


def text_of(tokens):
    """A text of these tokens: a letter each."""
    return "".join(chr(FIRST + token) for token in tokens)


def save_tokenizer(path):
    """Save a tokenizer with a letter for each token, and a template that adds nothing."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {chr(FIRST + number): number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token=chr(FIRST)))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template).save_pretrained(path)


@pytest.fixture(scope="module")
def url(needs_sglang, environment, model, tmp_path_factory):
    """Address of a server."""
    save_tokenizer(model)
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


async def chat(openai, prompt, tokens, most):
    """Return what a chat streams; the client goes away after ``most`` letters."""
    got = ""
    chunks = await openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": text_of(prompt)}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in chunks:
        got += (chunk.choices and chunk.choices[0].delta.content) or ""
        if most is not None and len(got) >= most:
            await chunks.close()
            break
    return got


async def chat_all(url, prompts, tokens, leaves):
    """Stream chats at a time."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300
    ) as openai:
        asked = zip(prompts, leaves, strict=True)
        return await asyncio.gather(
            *(chat(openai, prompt, tokens, most) for prompt, most in asked)
        )


def test_clients_stream_chats_and_a_third_goes_away(url, stock, prompt):
    """All at once, so that most of them wait for their turn. Each is within the budget."""
    lengths = [5, 90, 64, 97, 33, 80, 12, 100]
    prompts = [prompt(lengths[n % 8], 60 + n // 8) for n in range(32)]
    leaves = [None if n % 3 else 3 for n in range(32)]
    expected = [text_of(tokens) for tokens in stock.answer(prompts, 24)]
    for n, got in enumerate(asyncio.run(chat_all(url, prompts, 24, leaves))):
        assert got == expected[n] if n % 3 else expected[n].startswith(got)
        assert len(got) >= 3
    end, shown = time.monotonic() + 60, {}
    while shown.get("used_pages") != 0 or shown["requests"]:
        assert time.monotonic() < end, shown
        shown = json.loads(ask(f"{url}/server_info"))["internal_states"][0]["topkv"]


def test_beams_are_refused_and_others_go_on(url, stock, prompt):
    with pytest.raises(OSError, match="400"):
        generate(url, prompt(20, 42), beam_width=2, n=2)
    short = prompt(60, 43)
    assert [generate(url, short)["output_ids"]] == stock.answer([short], 16)
