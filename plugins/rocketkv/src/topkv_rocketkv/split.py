"""Division of a token budget between RocketKV's two stages; plain arithmetic.

The paper's budget t is what a step may read: keys and values of t / 2 tokens, and an index worth
as much. Of a prompt of n tokens the first stage keeps about ``n / c^a`` with c = n / t, and the
second narrows them down by the other ``c^(1 - a)``.
"""

from __future__ import annotations

import math


def capacity(tokens: int, budget: int, generated: int) -> int:
    """Tokens of a request that are kept, the generated ones included.

    Args:
        tokens: n, of the prompt.
        budget: t, tokens whose keys and values would be the traffic of a step.
        generated: tokens that are expected after the prompt.
    """
    ratio = max(1.0, tokens / budget)
    share = min(0.2 + 0.06 * math.log2(ratio), 0.8)
    return max(int(tokens / ratio**share), min(2 * generated, tokens))


def channels(dim: int, chunk: int, kept: int, budget: int) -> int:
    """r, 1 to D: as many as make the index of all that is kept worth t / 2 tokens.

    A chunk is read as one number a channel, of which a token's keys and values have 2 D.

    Args:
        dim: D.
        chunk: tokens that share a maximum and a minimum.
        kept: see ``capacity``.
        budget: t.
    """
    return min(max(int(dim * chunk / max(1.0, kept / budget)), 1), dim)
