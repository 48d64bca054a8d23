"""Recall of codes when the text goes elsewhere than the prompt did, on real keys, on a CPU.

    python plugins/pqcache/benchmarks/drift.py --out benchmarks/results/pqcache_drift.jsonl

The small checkpoint of topkv-evaluation reads ``--prompt`` bytes of source code and then
``--decoded`` bytes of prose, densely. PQCache is given the post-RoPE keys of each layer, code as a
prompt and prose as decoded tokens. The last ``QUERIES`` rows of prose then select ``--budget`` of
the tokens before them, by what is kept at the end: with 2047 bytes the last window is as long as
it can be before it gets a codebook, with 2048 it has one. ``mass`` is the softmax mass that a
selection holds, mean over rows, query heads, texts and layers. Three ways to score decoded tokens:

- ``frozen``: by the codebook of the prompt, all of them, as in the authors' code;
- ``last``: by a codebook of their window, those of the open window by the codebook before it;
- ``keys``: by a codebook of their window, those of the open window by their keys: this package.

``recent`` tokens are selected whatever they score, as the paper does; ``exact`` selects by q·k.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

import topkv_evaluation
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.types import GroupShape, LayerView, ModelShape, StepTensors
from topkv_pqcache import reference
from topkv_pqcache.algorithm import PQCache
from topkv_pqcache.entry import topkv_register_algorithms

QUERIES, ROUNDS = 64, 3
Pairs = list[tuple[Tensor, Tensor]]


def spy(kept: Pairs) -> str:
    """Name of an attention of Transformers that keeps queries and keys ``[n, heads, D]``."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **other: Any):
        kept.append((query[0].transpose(0, 1), key[0].transpose(0, 1)))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("spy", attend)
    return "spy"


def texts(prompt: int, decoded: int) -> list[Tensor]:
    """Bytes ``[1, prompt + decoded]`` of code and then prose, another part of both in each."""
    package = Path(topkv_evaluation.__file__).parent
    code = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    prose = (package / "tasks" / "data" / "haystack.txt").read_bytes()
    made = []
    for nth in range(ROUNDS):
        row = code[nth * prompt :][:prompt] + prose[nth * decoded :][:decoded]
        made.append(torch.tensor([list(row)]))
    return made


def algorithm_of(k: Tensor, q: Tensor, **params: int) -> tuple[PQCache, LayerView]:
    """An instance for one request as long as its keys, and an empty layer for it."""
    tokens, heads, dim = k.shape
    (entry,) = topkv_register_algorithms()
    model = ModelShape(1, q.shape[1], heads, dim, k.dtype, dim**-0.5)
    group = GroupShape((0,), 1, heads, 1, dim, k.dtype, 16, 1, tokens, 1, 2, 2)
    setup: Any = (model, group, entry.parameters(**params), torch.device("cpu"), None)
    algorithm = PQCache(AlgorithmSetup(*setup))
    pools = {
        spec.name: torch.zeros((1, *spec.shape), dtype=spec.dtype)
        for spec in algorithm.representations()
    }
    none = torch.zeros(1, dtype=torch.int32)
    step = StepTensors(none, none, none, none + 1, none, none[None])
    return algorithm, LayerView(0, 0, group, step, k[:0], k[:0], pools)


def decode(algorithm: PQCache, layer: LayerView, k: Tensor, prompt: int) -> None:
    """Settle a prompt, and what follows window by window, as the core does."""
    edges = [0, *range(prompt, len(k), algorithm.window), len(k)]
    for since, length in pairwise(edges):
        new = k[since:length]
        algorithm.settle(layer, 0, since, length, [(since, new, new)])


def scored_by(algorithm: PQCache, layer: LayerView, k: Tensor, how: str, prompt: int) -> Tensor:
    """The keys ``[n, h, D]`` that queries meet, fp32."""
    pools = {name: pool[0] for name, pool in layer.pools.items()}
    books, coded = pools["state"].tolist()
    if how == "frozen":
        books, coded = 1, prompt
    codes = pools["codes"].clone()
    behind = reference.encode(k[coded:], pools["centroids"][:, books - 1])
    codes[:, coded:] = behind.transpose(0, 1)
    book = reference.book_of(torch.arange(len(k)), pools["starts"], torch.tensor(books))
    near = reference.reconstruct(codes, book, pools["centroids"]).transpose(0, 1)
    return torch.cat([near[:coded], k[coded:].float()]) if how == "keys" else near


def mass(q: Tensor, k: Tensor, by: Tensor, select: int, recent: int) -> float:
    """Mass of the ``select`` tokens that are best by keys ``by``, per kv-head; mean over rows."""
    heads, found = k.shape[1], []
    for row in range(len(k) - QUERIES, len(k)):
        grouped = q[row].float().unflatten(0, (heads, -1)) * k.shape[2] ** -0.5
        true, scores = (
            torch.einsum("hgd,nhd->hgn", grouped, keys[:row].float()).softmax(-1)
            for keys in (k, by)
        )
        worth = scores.sum(1)
        worth[:, row - recent :] = torch.inf
        best = worth.topk(select, -1).indices
        found.append(true.gather(2, best[:, None].expand(-1, true.shape[1], -1)).sum(2).mean())
    return float(torch.stack(found).mean())


def measure(kept: Pairs, prompt: int, select: int, how: str, recent: int, **params: int) -> float:
    total = 0.0
    for q, k in kept:
        algorithm, layer = algorithm_of(k, q, **params)
        decode(algorithm, layer, k, prompt)
        total += mass(q, k, scored_by(algorithm, layer, k, how, prompt), select, recent)
    return round(total / len(kept), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--decoded", type=int, default=2047)
    parser.add_argument("--budget", type=float, default=2.0, help="percent of all tokens")
    parser.add_argument("--windows", type=int, nargs="+", default=[1024, 512, 256])
    options = parser.parse_args()
    kept: Pairs = []
    model = AutoModelForCausalLM.from_pretrained(
        topkv_evaluation.CHECKPOINT, attn_implementation=spy(kept), dtype=torch.bfloat16
    )
    with torch.no_grad():
        for row in texts(options.prompt, options.decoded):
            model(row)
    tokens = options.prompt + options.decoded
    select = round(tokens * options.budget / 100)
    exact = sum(mass(q, k, k, select, 0) for q, k in kept) / len(kept)
    same: dict[str, Any] = {"prompt": options.prompt, "decoded": options.decoded, "k": select}
    lines = [{**same, "how": "exact", "recent": 0, "mass": round(exact, 4)}]
    for subvectors, recent, how in product((4, 2), (0, select // 2), ("frozen", "last", "keys")):
        for window in options.windows[:1] if how == "frozen" else options.windows:
            params = {"subvectors": subvectors, "window": window, "segment": 2 * tokens}
            found = measure(kept, options.prompt, select, how, recent, **params)
            shown = None if how == "frozen" else window
            what = {"how": how, "subvectors": subvectors, "window": shown, "recent": recent}
            lines.append({**same, **what, "mass": found})
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
