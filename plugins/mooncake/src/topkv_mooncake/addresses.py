"""Addresses of this machine and of others."""

from __future__ import annotations

import socket


def host_towards(master: tuple[str, int]) -> str:
    """The address of this machine by which it reaches the master. Nothing is sent.

    Raises:
        OSError: there is no way to it.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        found: str = probe.getsockname()[0]
        return found


def written(place: tuple[str, int]) -> str:
    """An address as Mooncake takes it."""
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
