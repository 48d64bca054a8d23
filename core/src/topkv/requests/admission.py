"""Answer to the question whether further requests would find room."""

from __future__ import annotations

from attrs import frozen

from topkv.requests.requests import Requests


@frozen
class Admission:
    """Answer of ``can_admit``: truthy when there is room, else with the reasons."""

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons


def admission(held: Requests, tokens: int, requests: int) -> Admission:
    """Check whether ``requests`` new requests of ``tokens`` tokens each would find room.

    Buffers, rings, maps, representations and resident pages are allocated for ``max_requests`` and
    ``max_tokens`` when the coordinator is made, so what can run out are slots and pages.

    Args:
        held: the requests that hold slots and pages now.
    """
    reasons, limit = [], held.config.max_request_tokens
    if requests > held.free:
        reasons.append(f"{requests} request slots are needed and {held.free} are free")
    if tokens > limit:
        reasons.append(f"{tokens} tokens exceed max_request_tokens = {limit}")
    pages, free = requests * held.pages.needed(tokens), held.manager.host.free
    if pages > free:
        reasons.append(f"{pages} host pages are needed and {free} are free")
    return Admission(tuple(reasons))
