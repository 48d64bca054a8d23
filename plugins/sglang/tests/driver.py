"""A process with one engine of SGLang, which obeys lines of JSON.

SGLang keeps an engine's arguments in its process, so each engine of the tests has one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys


class Driver:
    """Commands, by their names."""

    engine = None

    def start(self, arguments, config=None):
        """Start an engine, through topkv where there is a configuration of it."""
        from sglang.srt.entrypoints.engine import Engine

        if config is not None:
            from topkv_sglang import engine_args

            arguments = engine_args(config, **arguments)
        self.engine = Engine(**arguments)

    def check(self, arguments, config=None, **changes):
        """Check arguments as an engine does before it starts anything.

        Args:
            arguments, config: as of ``start``.
            changes: of what SGLang has resolved, for options that it refuses itself here.
        """
        from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs

        from topkv_sglang import engine_args
        from topkv_sglang.refusals import check

        load_plugins()
        given = ServerArgs(**(arguments if config is None else engine_args(config, **arguments)))
        given.resolve_once()
        if not changes:
            return given.check_server_args()
        view = Changed(resolving_view(given), changes)
        check(view, model_config_of(given), changes.get("version", "0.5.23"))
        return None

    def moved(self):
        """Return places of SGLang that are not where they were."""
        from topkv_engines.places import moved
        from topkv_sglang.places import LATENT_PLACES, PLACES

        return moved(PLACES + LATENT_PLACES, "cpu", "SGLang")

    def answer(self, requests):
        """Run requests at a time; return what each got."""
        return self.engine.loop.run_until_complete(self._gather(requests))

    async def _gather(self, requests):
        return await asyncio.gather(*(self._run(n, each) for n, each in enumerate(requests)))

    async def _run(self, number, request):
        await asyncio.sleep(0.03 * request.get("wait", 0))  # a step takes about as long
        # Where the end of a text is ignored, SGLang admits as many as need no retraction.
        how = {"temperature": 0, "ignore_eos": False, "max_new_tokens": request["tokens"]}
        how |= request.get("options", {})
        name, abort = f"request-{number}-{os.urandom(4).hex()}", request.get("abort")
        stream = await self.engine.async_generate(
            input_ids=request["prompt"],
            sampling_params=how,
            rid=name,
            lora_path=request.get("adapter"),
            stream=True,
        )
        if abort == 0:
            asyncio.get_running_loop().call_later(
                0.03, self.engine.tokenizer_manager.abort_request, name
            )
        got = {}
        async for got in stream:
            if abort and len(got["output_ids"]) >= abort:
                self.engine.tokenizer_manager.abort_request(name)
        about = got.get("meta_info", {})
        return {
            "tokens": got.get("output_ids", []),
            "found": about.get("cached_tokens", 0),
            "retracted": about.get("num_retractions", 0),
            "verified": about.get("spec_verify_ct", 0),
            "ended": about.get("finish_reason"),
        }

    def state(self):
        """Return the state of the scheduler."""
        (state,) = self.engine.get_server_info()["internal_states"]
        return {name: state.get(name) for name in ("topkv", "watched")}

    def check_integrity(self):
        """Check topkv's pages and maps in the scheduler, see ``watch``."""
        self.engine.collective_rpc("check_integrity")

    def check_pool_is_shared(self):
        """Check that all ranks have one host pool, see ``watch``."""
        self.engine.collective_rpc("check_pool_is_shared")

    def flush(self):
        """Empty the radix cache."""
        return bool(self.engine.flush_cache().success)


class Changed:
    """Arguments, some of which are others.

    Args:
        arguments: of SGLang.
        changes: by name.
    """

    def __init__(self, arguments, changes):
        self.arguments, self.changes = arguments, changes

    def __getattr__(self, name):
        return self.changes[name] if name in self.changes else getattr(self.arguments, name)


def main():
    """Answer each line; what SGLang prints goes to the log."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver = Driver()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"answer": getattr(driver, command.pop("do"))(**command)}
        except Exception as error:
            reasons = [*getattr(error, "reasons", ())]
            answer = {"error": type(error).__name__, "reasons": reasons, "text": str(error)}
        channel.write(json.dumps(answer) + "\n")
    if driver.engine is not None:
        driver.engine.shutdown()


if __name__ == "__main__":
    main()
