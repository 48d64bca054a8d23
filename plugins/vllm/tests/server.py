"""vLLM's OpenAI server as ``topkv serve`` starts it, and clients of it."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress

import torch

PAGE = 32
"""Tokens of a page."""


class Server:
    """A server that ``topkv serve`` starts.

    Args:
        options: words behind ``topkv serve``; a host and a port are added.
        log: a file for what it says.

    Attributes:
        url: where it listens.
    """

    def __init__(self, options, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        command = [sys.executable, "-m", "topkv_cli", "serve", *options]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        if torch.cuda.is_available():  # which other engines share
            command += ["--gpu-memory-utilization", "0.02"]
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT
            )

    def kill(self):
        """End it and the processes that it started, which would outlive it."""
        import psutil

        if self.process.poll() is None:
            started = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            for child in started:
                with suppress(psutil.NoSuchProcess):
                    child.kill()

    def said(self):
        """The end of its log."""
        return self.log.read_text()[-4000:]

    def wait_until_ready(self, seconds=240):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.said()
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self.said())

    def metrics(self, label=""):
        """Sums of what it shows to Prometheus, by name; with a label alone if one is given."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        sums = {}
        for name, labels, value in re.findall(r"^([\w:]+)(\{.*\})? (\S+)$", text, re.MULTILINE):
            if label in labels:
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def wait_until_nothing_is_held(self, seconds=60):
        """No request runs or waits, and no page of the host pool is held."""
        end = time.monotonic() + seconds
        names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
        while any(left := [self.metrics()[f"vllm:{name}"] for name in names]):
            assert time.monotonic() < end, (left, self.said())
            time.sleep(0.2)
        while self.metrics()["vllm:topkv_used_pages"]:
            assert time.monotonic() < end, self.said()
            time.sleep(0.2)


@contextmanager
def ready(options, log):
    """A server that is ready, and ends with the context; for arguments see ``Server``."""
    server = Server(options, log)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def serving(model, folder, longest, chunk, *more):
    """A server that is ready, and selects all tokens of requests.

    Args:
        model: a directory.
        folder: of its log.
        longest: tokens of a request.
        chunk: tokens of a step.
        more: options of vLLM.
    """
    options = [str(model), "--algorithm", "quest", "--backend", "triton_attention"]
    options += ["--budget", str(longest), "--set", "dense_layers=[]"]
    options += ["--max-tokens", str(4 * longest), "--max-num-seqs", "4"]
    options += ["--block-size", str(PAGE), "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", str(longest), "--max-num-batched-tokens", str(chunk)]
    # Without a time for shutdown vLLM may leave open streams waiting for an engine that is gone.
    options += ["--served-model-name", "tiny", "--shutdown-timeout", "60", *more]
    return ready(options, folder / "log")


def client(server):
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


def stream_all(server, prompts, tokens, leaves=None):
    """Token ids of each prompt, all of which stream at once; see ``stream``."""

    async def together():
        async with client(server) as openai:
            asked = zip(prompts, leaves or [None] * len(prompts), strict=True)
            return await asyncio.gather(
                *(stream(openai, each, tokens, most) for each, most in asked)
            )

    return asyncio.run(together())


async def stream(openai, prompt, tokens, most=None):
    """Token ids that a completion streams, or a chat where the prompt is a text; the client goes
    away after ``most`` tokens."""
    got = []
    asked = {"prompt": prompt}
    create = openai.completions.create
    if isinstance(prompt, str):
        asked = {"messages": [{"role": "user", "content": prompt}]}
        create = openai.chat.completions.create
    chunks = await create(
        model="tiny",
        **asked,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in chunks:
        got += getattr(chunk.choices[0], "token_ids", None) or []  # the first one has a role
        if most is not None and len(got) >= most:
            await chunks.close()
            break
    return got
