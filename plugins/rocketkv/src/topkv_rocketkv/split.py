"""Division of a token budget between RocketKV's two stages; plain arithmetic.

The paper's budget t is what a step may read: keys and values of t / 2 tokens, and an index worth
as much. Of a prompt of n tokens the first stage keeps about ``n / c^a`` with c = n / t, and the
second narrows them down by the other ``c^(1 - a)``.
"""

from __future__ import annotations

import math

from attrs import frozen


@frozen
class Split:
    """A budget as the paper divides it.

    Attributes:
        capacity: tokens of a request that are kept, the generated ones included.
        prompt: tokens of the prompt that are kept, the window included.
        select: tokens that a step attends.
        chunk: tokens that share a maximum and a minimum.
        channels: channels of them that a step reads.
    """

    capacity: int
    prompt: int
    select: int
    chunk: int
    channels: int


def split(tokens: int, budget: int, dim: int, generated: int) -> Split:
    """Divide a budget as the paper does.

    Args:
        tokens: n, of the prompt.
        budget: t, tokens whose keys and values would be the traffic of a step.
        dim: D.
        generated: tokens that are expected after the prompt.
    """
    ratio = max(1.0, tokens / budget)
    share = min(0.2 + 0.06 * math.log2(ratio), 0.8)
    capacity = max(int(tokens / ratio**share), min(2 * generated, tokens))
    spread = narrowing(capacity, budget)
    root = math.ceil(math.sqrt(spread))
    chunk = root if root <= spread else 1
    prompt = max(capacity - generated, 0)
    return Split(capacity, prompt, budget // 2, chunk, channels(dim, chunk, spread))


def narrowing(capacity: int, budget: int) -> float:
    """c2, by which the second stage narrows down what the first has kept."""
    return max(1.0, capacity / budget)


def channels(dim: int, chunk: int, spread: float) -> int:
    """r, 1 to D: as many as make the index of ``spread`` times t tokens worth t / 2 tokens.

    A chunk is read as one number a channel, of which a token's keys and values have 2 D.
    """
    return min(max(int(dim * chunk / spread), 1), dim)


def sizes(
    tokens: int, attended: int, unit: int, dim: int, generated: int, window: int
) -> tuple[int, int]:
    """Tokens that are kept of a prompt, and r, where chunks are the units of a group.

    Args:
        tokens: of the prompt.
        attended: of a step, the open unit included: t / 2.
        unit: tokens of a chunk.
        dim, generated: as of ``split``.
        window: last tokens of the prompt, which are always kept.

    Returns:
        Tokens, never less than a step attends or than the window and one more; and r.
    """
    found = split(tokens, 2 * attended, dim, generated)
    read = channels(dim, unit, narrowing(found.capacity, 2 * attended))
    return max(found.prompt, attended, window + 1), read
