"""The grid through SGLang."""

from __future__ import annotations

from topkv_bench.engine_bench import EngineBench
from topkv_bench.options import Options


class SglangBench(EngineBench):
    """See ``EngineBench``."""

    title, cell = "SGLang", "topkv_bench.sglang_cell"

    def refused_options(self, options: Options) -> list[str]:
        """See ``EngineBench``."""
        ranks = ("tp_size", "pp_size", "dp_size")
        found = {
            "--queries: SGLang accepts no stated share of drafts": options.queries is not None,
            "--fill pool: prompts are read through SGLang": options.fill == "pool",
            "--engine-arg: each cell is one process, and so one rank": any(
                options.engine_args.get(name, 1) != 1 for name in ranks
            ),
        }
        try:
            from topkv_sglang.versions import installed
        except ImportError as error:
            found[f"topkv-sglang is not installed: {error}; pip install topkv-sglang"] = True
        else:
            found[
                "SGLang is not installed; install it, or leave --engine sglang out"
            ] = not installed()
        return [reason for reason, is_so in found.items() if is_so]

    def version(self) -> str:
        """See ``EngineBench``."""
        from topkv_sglang.versions import installed

        return installed() or ""
