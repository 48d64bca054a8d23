"""SGLang's server as ``topkv serve`` starts it, and clients of it."""

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
from contextlib import contextmanager

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


def options(port, longest=LONGEST, chunk=CHUNK):
    """Options of the README's command, and those of the device."""
    words = ["--max-running-requests", 4, "--page-size", PAGE, "--context-length", longest]
    words += ["--chunked-prefill-size", chunk, "--device", DEVICE]
    words += ["--disable-cuda-graph"] if DEVICE == "cpu" else ["--mem-fraction-static", 0.06]
    words += ["--sampling-backend", "pytorch"]
    words += ["--dtype", "float32", "--served-model-name", "tiny", "--enable-metrics"]
    return [*map(str, words), "--port", str(port), "--skip-server-warmup"]


def command(model, settings, words):
    """The command line that starts the server."""
    ours = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
    line = [sys.executable, "-m", "topkv_cli", "serve", str(model), "--engine", "sglang", *ours]
    return [*line, *words]


@contextmanager
def serving(model, environment, log, settings=SETTINGS, **sizes):
    """Address of a server that is ready, and ends with the context.

    Args:
        model: a folder, which gets a tokenizer.
        environment: of its processes.
        log: a file for what it says.
        settings: of topkv.
        sizes: see ``options``.
    """
    save_tokenizer(model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = command(model, settings, options(port, **sizes))
    with log.open("w") as out:
        process = subprocess.Popen(
            line, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 400
    try:
        while time.monotonic() < end:
            assert process.poll() is None, log.read_text()[-6000:]
            try:
                ask(f"{url}/health")
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


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


def wait_until_nothing_is_held(url):
    """No request has a slot or a page."""
    end, shown = time.monotonic() + 60, {}
    while shown.get("used_pages") != 0 or shown["requests"]:
        assert time.monotonic() < end, shown
        shown = json.loads(ask(f"{url}/server_info"))["internal_states"][0]["topkv"]
