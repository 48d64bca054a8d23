"""The grid through vLLM."""

from __future__ import annotations

from topkv_bench.engine_bench import EngineBench
from topkv_bench.options import Options


class VllmBench(EngineBench):
    """See ``EngineBench``."""

    title, cell = "vLLM", "topkv_bench.vllm_cell"

    def refused_options(self, options: Options) -> list[str]:
        """See ``EngineBench``."""
        found = {
            "--queries: vLLM accepts a stated share of drafts on a GPU alone": (
                max(options.queries or (1,)) > 1 and options.device.type != "cuda"
            ),
            "--engine-arg: each cell is one process, and so one rank": any(
                name.endswith("parallel_size") and size != 1
                for name, size in options.engine_args.items()
            ),
        }
        try:
            from topkv_vllm.versions import installed
        except ImportError as error:
            found[f"topkv-vllm is not installed: {error}; pip install topkv-vllm"] = True
        else:
            found[
                "vLLM is not installed; install it, or leave --engine vllm out"
            ] = not installed()
        return [reason for reason, is_so in found.items() if is_so]

    def version(self) -> str:
        """See ``EngineBench``."""
        from topkv_vllm.versions import installed

        return next(iter(installed().values()))
