"""Share of the tokens selected by bfloat16 index keys that fp8 keys find, by a trained indexer.

    python benchmarks/index_recall.py --out benchmarks/results/index_recall.jsonl

The small DeepSeek-V3.2 that comes with topkv-evaluation reads held-out documents, stock and in
chunks. Inputs of its indexers give queries, keys and weights of every layer, and these, for every
row of the second half, the best 256 tokens: by bfloat16 keys, and by e4m3 keys and queries as
deepseek_dsa rounds them. ``recall`` is the share of the first set that the second holds; ``mass``
the attention mass of the first, summed over the heads and normalised to 1; ``mass_kept`` the share
of this mass that the second set holds. Means over documents, layers and rows;
``least_*`` are of single rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from topkv_deepseek_dsa.reference import decode, hadamard, quantize, scores
from topkv_evaluation import DSA_CHECKPOINT
from topkv_evaluation.retrieval import make_prompt
from topkv_transformers.indexer import Rotation, project, rotation_of
from topkv_transformers.latent import rotary_of

CHUNK, BLOCK = 512, 256
KINDS = [(name, turned) for name in ("fp32", "ue8m0") for turned in (False, True)]
"""Scale formats, with and without a Hadamard transform."""


@dataclass
class Layer:
    """One layer of one document of n tokens.

    Attributes:
        index_q, index_k, weights: ``[n, H^I, D^I]``, ``[n, D^I]``, fp32 ``[n, H^I]``.
        q, k: ``[H, n, nope + rope]`` of the attention.
        scaling: of its logits.
    """

    index_q: Tensor
    index_k: Tensor
    weights: Tensor
    q: Tensor
    k: Tensor
    scaling: float


@torch.no_grad()
def record(model: PreTrainedModel, tokens: Tensor) -> list[Layer]:
    """Let the stock model read ``[1, n]`` in chunks; return the projected inputs of its layers."""
    modules: list[Any] = [layer.self_attn for layer in model.model.layers]
    rotation = rotation_of(modules[0].indexer)
    if rotation is None:
        raise ValueError(f"the RoPE of {type(modules[0].indexer).__qualname__} is not known")
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in modules]
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args, given, part=part: part.append(
                (
                    given["hidden_states"][0],
                    *(angles[0] for angles in given["position_embeddings"]),
                )
            ),
            with_kwargs=True,
        )
        for module, part in zip(modules, parts, strict=True)
    ]
    cache = DynamicCache(config=model.config)
    for chunk in tokens.split(CHUNK, dim=1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    return [
        layer_of(module, rotation, *map(torch.cat, zip(*part, strict=True)))
        for module, part in zip(modules, parts, strict=True)
    ]


def layer_of(module: Any, rotation: Rotation, x: Tensor, cos: Tensor, sin: Tensor) -> Layer:
    """Index and attention of rows ``[n, hidden]``; ``cos`` and ``sin`` are ``[n, rope]``."""
    q_resid = module.q_a_layernorm(module.q_a_proj(x))
    index = project(module.indexer, rotation, x, q_resid, cos, sin)
    rope, nope = module.qk_rope_head_dim, module.qk_nope_head_dim
    q = module.q_b_proj(q_resid).unflatten(1, (module.num_heads, -1)).transpose(0, 1)
    latent, k_rope = module.kv_a_proj_with_mqa(x).split([module.kv_lora_rank, rope], dim=-1)
    expanded = module.kv_b_proj(module.kv_a_layernorm(latent))
    k = expanded.unflatten(1, (module.num_heads, -1)).transpose(0, 1)[..., :nope]
    q_rope, k_rope = rotary_of(module)(
        q[None, ..., nope:], k_rope[None, None], cos[None], sin[None]
    )
    q = torch.cat((q[..., :nope], q_rope[0]), dim=-1)
    k = torch.cat((k, k_rope[0].expand(module.num_heads, -1, -1)), dim=-1)
    return Layer(index.q, index.k, index.weights, q, k, module.scaling)


def selected(values: Tensor, visible: Tensor, topk: int) -> Tensor:
    """bool ``[m, n]``: the best tokens of each row, of its visible ones."""
    best = values.masked_fill(~visible, -torch.inf).topk(topk).indices
    return torch.zeros_like(visible).scatter_(1, best, True)


def rounded_scores(layer: Layer, rows: slice, power_of_two: bool, turned: bool) -> Tensor:
    """Scores of deepseek_dsa, fp32 ``[m, n]``: queries and keys in e4m3."""
    q, k = layer.index_q[rows], layer.index_k
    if turned:
        q, k = hadamard(q), hadamard(k)
    (q, q_scale), (k, k_scale) = quantize(q, power_of_two), quantize(k, power_of_two)
    return scores(decode(q), decode(k), layer.weights[rows] * q_scale) * k_scale


def compare(layer: Layer, topk: int) -> Iterator[tuple[Tensor, dict[tuple[str, bool], Tensor]]]:
    """Compare blocks of the rows of the second half.

    Yields:
        The attention mass ``[m]`` of the tokens that bfloat16 keys select; and for each kind
        ``[2, m]``: the share of these tokens that fp8 keys select too, and the mass of their
        selection.
    """
    n = len(layer.index_k)
    for start in range(n // 2, n, BLOCK):
        rows = slice(start, min(start + BLOCK, n))
        at = torch.arange(n, device=layer.q.device)
        visible = at <= at[rows, None]
        exact = scores(layer.index_q[rows].float(), layer.index_k.float(), layer.weights[rows])
        wanted = selected(exact, visible, topk)
        logits = layer.q[:, rows].float() @ layer.k.float().mT * layer.scaling
        mass = logits.masked_fill(~visible, -torch.inf).softmax(-1).mean(0)
        found = {}
        for name, turned in KINDS:
            ours = selected(rounded_scores(layer, rows, name == "ue8m0", turned), visible, topk)
            share = (ours & wanted).sum(1) / topk
            found[name, turned] = torch.stack([share, (mass * ours).sum(1)])
        yield (mass * wanted).sum(1), found


def measure(model: PreTrainedModel, tokens: int, documents: int) -> list[dict[str, object]]:
    """Measure a line for each kind; ``by_layer`` are mean recalls."""
    topk = model.config.index_topk
    layers = range(model.config.num_hidden_layers)
    masses: list[list[Tensor]] = [[] for _ in layers]
    every: dict[tuple[str, bool], list[list[Tensor]]] = {
        kind: [[] for _ in layers] for kind in KINDS
    }
    for seed in range(documents):
        document = torch.from_numpy(make_prompt(tokens, seed=seed).tokens.astype("int64"))
        for number, layer in enumerate(record(model, document[None].to(model.device))):
            for mass, found in compare(layer, topk):
                masses[number].append(mass.cpu())
                for kind, figures in found.items():
                    every[kind][number].append(figures.cpu())
    mass = torch.stack([torch.cat(parts) for parts in masses])  # [layers, rows]
    lines: list[dict[str, object]] = []
    for name, turned in KINDS:
        figures = torch.stack([torch.cat(parts, dim=1) for parts in every[name, turned]])
        recall, kept = figures[:, 0], figures[:, 1] / mass
        lines.append(
            {
                "tokens": tokens,
                "documents": documents,
                "rows": recall.shape[1],
                "select": topk,
                "scale_format": name,
                "hadamard": turned,
                "recall": round(float(recall.mean()), 4),
                "least_recall": round(float(recall.min()), 4),
                "by_layer": [round(value, 4) for value in recall.mean(1).tolist()],
                "mass": round(float(mass.mean()), 4),
                "mass_kept": round(float(kept.mean()), 5),
                "least_mass_kept": round(float(kept.min()), 5),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--documents", type=int, default=2)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        DSA_CHECKPOINT, dtype="auto", local_files_only=True, trust_remote_code=False
    )
    model = model.to(options.device).eval()
    cuda = model.device.type == "cuda"
    cells: list[dict[str, object]] = [
        {
            "device": torch.cuda.get_device_name(model.device) if cuda else "cpu",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": str(model.dtype).removeprefix("torch."),
        }
    ]
    for tokens in options.tokens:
        for line in measure(model, tokens, options.documents):
            print(line, flush=True)
            cells.append(line)
    if options.out:
        options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))


if __name__ == "__main__":
    main()
