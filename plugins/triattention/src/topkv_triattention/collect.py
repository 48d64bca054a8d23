"""What the queries of a Transformers model are like before RoPE: makes calibration files.

    python -m topkv_triattention.collect --model DIR --text FILE --output FILE

Queries are taken where the model hands them to its attention function, after RoPE, and turned
back. Which channels RoPE turns, and how fast, is tried and not believed: the same text at other
positions must give the same queries, turned so. A layer of which that cannot be said is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from topkv.errors import CapabilityError, ConfigError
from topkv_triattention.calibration import LayerQueries, write

NAME = "topkv_triattention"

TOLERANCE = 0.1
"""How far queries at other positions may lie from those that were turned, beside their size. bf16
errs by some hundredths, a wrong guess by one or so."""


@frozen(eq=False)
class Turning:
    """How RoPE turns a head: int64 ``pairs [2, D / 2]``, fp64 ``omega [D / 2]``."""

    pairs: Tensor
    omega: Tensor

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """fp64 ``[..., m, D]``, by so many positions ``[m]``."""
        x, angles = x.double(), positions.double()[:, None] * self.omega
        a, b = x[..., self.pairs[0]], x[..., self.pairs[1]]
        turned = torch.empty_like(x)
        turned[..., self.pairs[0]] = a * angles.cos() - b * angles.sin()
        turned[..., self.pairs[1]] = a * angles.sin() + b * angles.cos()
        return turned


def guesses(model: PreTrainedModel, dim: int) -> list[Turning]:
    """All ways in which RoPE may turn a head of ``dim`` channels, by the frequencies that the
    model has: none of them, the first or the last ones, in halves or two neighbours each."""
    found = [torch.empty(0)] + [
        buffer.detach().float()
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name and 2 * buffer.numel() <= dim
    ]
    made = []
    for each in found:
        turned, device = 2 * len(each), model.device
        omega = torch.zeros(dim // 2, dtype=torch.float64, device=device)
        omega[: len(each)] = each
        here, rest = torch.arange(turned, device=device), torch.arange(turned, dim, device=device)
        for first in {0, dim - turned}:
            order = (torch.cat([here, rest]) + first) % dim
            for pairs in (here.view(2, len(each)), here.view(len(each), 2).T):
                both = torch.cat([pairs, rest.view(len(rest) // 2, 2).T], 1)
                made.append(Turning(order[both], omega))
    return made


@contextmanager
def _watched(model: PreTrainedModel, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Let every attention of the model show the number of its layer and its queries."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        see(module.layer_idx, query[0])
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


@torch.no_grad()
def queries(model: PreTrainedModel, tokens: Tensor, first: int) -> dict[int, Tensor]:
    """Post-RoPE queries by layer, ``[H, m, D]``, of tokens ``[m]`` at positions from ``first``."""
    found: dict[int, Tensor] = {}
    positions = first + torch.arange(len(tokens), device=model.device)
    with _watched(model, found.__setitem__):
        model.base_model(
            input_ids=tokens[None].to(model.device), position_ids=positions[None], use_cache=False
        )
    return found


def turnings(model: PreTrainedModel, tokens: Tensor) -> dict[int, Turning]:
    """How RoPE turns each layer, tried on a text.

    Raises:
        CapabilityError: the model's attention does not pass through Transformers' interface, or
            its queries are turned otherwise than by RoPE of fixed frequencies.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
    by = max(1, most - len(tokens))  # as far as the model goes: some change frequencies there
    near, far = (queries(model, tokens, first) for first in (0, by))
    what, reasons, found = f"{type(model).__name__} cannot be calibrated", [], {}
    if not near:
        raise CapabilityError(what, ["none of its layers calls Transformers' attention interface"])
    for layer, q in near.items():
        shift = torch.full((q.shape[1],), by, device=q.device)
        tried = [
            (float((each.turn(q, shift) - far[layer]).norm() / far[layer].norm()), each)
            for each in guesses(model, q.shape[-1])
        ]
        error, found[layer] = min(tried, key=lambda pair: pair[0])
        if not error <= TOLERANCE:
            reasons.append(
                f"queries of layer {layer} at positions from {by} differ by {error:.2f} of "
                "their size from those at 0, turned by the frequencies of the model; it rotates "
                "them otherwise, or by more than their position"
            )
    if reasons:
        raise CapabilityError(what, reasons)
    return found


def collect(model: PreTrainedModel, blocks: list[Tensor]) -> dict[int, LayerQueries]:
    """What a calibration file says of a model.

    Args:
        model: a decoder with RoPE that dispatches its attention through Transformers.
        blocks: int64 ``[m]`` token ids each, read from position 0 on.

    Raises:
        CapabilityError: see ``turnings``.
    """
    turned_by, total = turnings(model, blocks[0]), dict[int, Tensor]()
    for tokens in blocks:
        for layer, q in queries(model, tokens, 0).items():
            turning = turned_by[layer]
            back = turning.turn(q, -torch.arange(len(tokens), device=q.device))
            size = torch.hypot(back[..., turning.pairs[0]], back[..., turning.pairs[1]])
            total[layer] = total.get(layer, 0) + torch.cat([back, size], -1).sum(1)
    count = sum(map(len, blocks))
    found = {}
    for layer, turning in turned_by.items():
        dim = 2 * len(turning.omega)
        mean, size = (total[layer] / count).float().split([dim, dim // 2], 1)
        ways = turning.pairs.T.tolist(), turning.omega.tolist()
        found[layer] = LayerQueries(*ways, mean.tolist(), size.tolist())
    return found


def load(folder: Path, device: str) -> PreTrainedModel:
    """The model of a local directory, with all weights that its configuration asks for.

    Raises:
        ConfigError: there is no such directory, or weights are missing.
    """
    if not folder.is_dir():
        raise ConfigError(f"--model {folder}", ["there is no such directory; name a local one"])
    # Transformers would fill in random weights.
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    reasons = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    if reasons:
        raise ConfigError(f"the weights in {folder} are not those of its config.json", reasons)
    return model.to(device).eval()


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory, with a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8, thousands of tokens")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--block", type=int, default=1024, help="tokens that are read at once")
    parser.add_argument("--most", type=int, default=65536, help="tokens that are read of the text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(args)
    model = load(asked.model, asked.device)
    tokenizer = AutoTokenizer.from_pretrained(asked.model, local_files_only=True)
    text = asked.text.read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)[: asked.most]
    if not len(tokens):
        raise ConfigError(f"--text {asked.text}", ["it holds no token; name a text of thousands"])
    found = collect(model, [*tokens.split(asked.block)])
    write(asked.output, found)
    print(f"queries of {len(found)} layers over {len(tokens)} tokens written to {asked.output}")


if __name__ == "__main__":
    main()
