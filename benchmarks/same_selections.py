"""Selections and outputs of two checkouts beside each other, on random and on adversarial input.

    python benchmarks/same_selections.py run OLD ROWS before
    python benchmarks/same_selections.py run . ROWS after
    python benchmarks/same_selections.py compare before after NEW_ROWS

ROWS has the cases: ``benchmarks/results/selections_hooks3.jsonl.xz``, or a file like it. ``run``
puts the sources of a checkout, of hook API 2 or 3, before all that is installed, and leads three
requests of different lengths through each case: prompts in chunks beside decode rows, decoded
tokens, tokens that are taken back, a request that is cut, one that ends, one that is forked.
Freed memory is NaN. Everything that was selected is kept, for prompts and for warming too, and
outputs and log-sum-exps. With ``--impl triton`` algorithms, stages and top-k are
kernels, of which TRITON_INTERPRET=1 makes a CPU do; all else is reference.

``compare`` writes a row for each case: rows of selections (``selections``, ``distinct`` ones),
how many are unequal, and unequal as sets, and the same of tensors of outputs, with the largest
difference. ``refused`` is the reason where both checkouts refuse the case.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from selection_lives import Feed, Life

LAYERS = {"reference": 2, "triton": 1}
MOST = {"reference": 320, "triton": 64}
APART = (
    "topkv_vllm",
    "topkv_transformers",
    "topkv_prefixes",
)  # engines, and what one checkout has


def check_integrity(coordinator: Any) -> None:
    """Check pages and maps, by a method of the coordinator where a checkout has it there."""
    if hasattr(coordinator, "check_integrity"):
        coordinator.check_integrity()
    else:
        import_module("topkv_testing.integrity").check_integrity(coordinator)


def coordinator_of(case: dict[str, Any], impl: str, registry: Any) -> tuple[Any, int]:
    """Make the coordinator of a case, and return its budget: of ``least`` the smallest one."""
    from topkv.config import SparseConfig, lower
    from topkv.coordinator import SparseCoordinator
    from topkv.errors import ConfigError
    from topkv.types import IndexerShape, ModelShape

    given, old = dict(case), hasattr(SparseConfig, "from_dict")
    own = {"deepseek_dsa": IndexerShape(4, 16), "trained_gate": IndexerShape(2, 16)}
    latent = given.pop("attention", "gqa") == "mla" or case["algorithm"] == "deepseek_dsa"
    dtype = getattr(torch, given.pop("dtype", "float32"))
    sizes = (LAYERS[impl], 4, 1, 96) if latent else (LAYERS[impl], 4, 2, 64)
    further = ("mla", 64) if latent else ("gqa", None)
    model = ModelShape(*sizes, dtype, 0.25, *further, own.get(case["algorithm"]))
    if given.pop("regranulate", False):
        given.update({"regranulate": True} if old else {"stages": ["regranulate"]})
    plain = {"backend": "triton_attention", "impl": "reference", "poison": True}
    plain |= {"page_tokens": 32, "dense_layers": (), "max_requests": 3}
    plain |= {"max_tokens": 3 * MOST[impl], "max_request_tokens": MOST[impl]}
    least, refused = [n * case.get("unit", 1) for n in range(1, 200)], ConfigError("", [])
    del given["data"]
    for budget in {"whole": [MOST[impl]], "least": least}.get(case["budget"], [case["budget"]]):
        settings: Any = {**plain, **given, "budget": budget}
        read = SparseConfig.from_dict if old else SparseConfig.load  # type: ignore[attr-defined]
        try:
            config = lower(read(settings), model, device=torch.device("cpu"), registry=registry)
            return SparseCoordinator(config, registry), budget
        except ConfigError as error:
            refused = error
    raise refused


def registry_of(tree: Path, impl: str) -> Any:
    """Import topkv and the plugins of a checkout, before anything that is installed."""
    parts = [tree / "core", *tree.glob("plugins/*"), *tree.glob("tools/*")]
    sys.path[:0] = [str(part / "src") for part in parts]
    projects = [tomllib.loads((part / "pyproject.toml").read_text("utf-8")) for part in parts]
    points = [each["project"].get("entry-points", {}).get("topkv", {}) for each in projects]
    names = [name for point in points for name in point.values() if not name.startswith(APART)]
    from topkv.plugins import PluginRegistry

    class Kernels(PluginRegistry):
        """Makes kernels of algorithms, stages and top-k; all else is reference."""

        def create(self, kind: str, name: str, setup: object, impl: str = "reference") -> Any:
            chosen = "triton" if kind in ("algorithm", "stage", "topk") else impl
            return super().create(kind, name, setup, chosen)

    made = Kernels if impl == "triton" else PluginRegistry
    return made([(name, "0", import_module(name)) for name in names])


def run(tree: Path, rows: Path, out: Path, impl: str) -> None:
    """Write what each case of an implementation gives to a file of its own."""
    registry = registry_of(tree.resolve(), impl)
    from topkv.errors import ConfigError

    out.mkdir(parents=True, exist_ok=True)
    data = lzma.decompress(rows.read_bytes()) if rows.suffix == ".xz" else rows.read_bytes()
    for number, row in enumerate(map(json.loads, data.splitlines())):
        if row["impl"] != impl:
            continue
        kept = {"row": np.array(json.dumps({"impl": impl, "case": row["case"]}))}
        try:
            coordinator, budget = coordinator_of(row["case"], impl, registry)
        except ConfigError as error:
            kept["refused"] = np.array(str(error))
        else:
            life = Life(coordinator, Feed(row["case"]["data"], coordinator.model), impl)
            life.run()
            check_integrity(coordinator)
            coordinator.close()
            kept |= {**life.kept, "budget": np.array(budget)}
        np.savez(out / f"{number:04d}.npz", **kept)
        print(number, row["case"], flush=True)


def compare(before: Path, after: Path, rows: Path) -> None:
    """Write a row for each case that both checkouts ran."""
    with rows.open("w", encoding="utf-8") as file:
        for path in sorted(after.glob("*.npz")):
            old, new = dict(np.load(before / path.name)), dict(np.load(path))
            row = json.loads(str(new.pop("row")))
            if row != json.loads(str(old.pop("row"))):
                raise ValueError(f"{path.name} is of another case in {before}")
            file.write(json.dumps({**row, **differences(old, new)}) + "\n")


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Count what differs in one case."""
    if old.keys() != new.keys():
        alone = sorted(old.keys() ^ new.keys())
        return {"reason": f"only one checkout has {len(alone)} of the results, first {alone[0]}"}
    if "refused" in new:
        return {"refused": str(new["refused"])}
    if old["budget"] != new["budget"]:
        return {"reason": f"the smallest budget is {old['budget']} before and {new['budget']} now"}
    selections, outputs, distinct, gap = [0, 0, 0], [0, 0], 0, 0.0
    for name, found in new.items():
        then, kind = old[name], name.split()[-2:][0]
        if found.shape != then.shape:
            return {"reason": f"{name} is {then.shape} before and {found.shape} now"}
        if kind in ("select", "warm", "select_prompt"):
            unequal = [(a != b).any(-1) for a, b in ((then, found), (sort(then), sort(found)))]
            counts = (len(found), *(int(each.sum()) for each in unequal))
            selections = [sum(pair) for pair in zip(selections, counts, strict=True)]
            distinct += len(np.unique(found, axis=0))
        elif kind in ("out", "lse") and not np.array_equal(then, found, equal_nan=True):
            outputs[1] += 1
            gap = max(gap, float(np.nanmax(np.abs(then - found))))
        outputs[0] += kind in ("out", "lse")
    return {
        "budget": int(new["budget"]),
        **dict(zip(("selections", "unequal", "unequal_sets"), selections, strict=True)),
        "distinct": distinct,
        **dict(zip(("outputs", "unequal_outputs"), outputs, strict=True)),
        "largest_difference": gap,
    }


def sort(ids: Any) -> Any:
    return np.sort(ids, -1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("run", "compare"))
    parser.add_argument("paths", type=Path, nargs=3)
    parser.add_argument("--impl", choices=tuple(LAYERS), default="reference")
    given = parser.parse_args()
    if given.command == "compare":
        compare(*given.paths)
    else:
        torch.set_num_threads(1)
        with torch.inference_mode():
            run(*given.paths, given.impl)


if __name__ == "__main__":
    main()
