"""Steps of DeepSeek's sparse attention (DSA) in stock SGLang, with HiSparse or without it.

    python plugins/sglang/benchmarks/hisparse.py --config FILE --context 128000 --requests 8 \\
        --drift 0.1 --engine-arg kv_cache_dtype=fp8_e4m3 --engine-arg enable_hisparse=true

Options are those of ``topkv bench``, whose rows of topkv stand beside these: both read random
prompts, and selections of both drift alike. See ``hisparse_cell``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command."""
    from topkv_bench.command import bench
    from topkv_bench.sglang_bench import SglangBench

    here = str(Path(__file__).parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    SglangBench.cell = "hisparse_cell"
    bench([*sys.argv[1:], "--engine", "sglang", "--contestants", "dense"])


if __name__ == "__main__":
    main()
