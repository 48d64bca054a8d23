"""The parameters of the storage, checked."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from topkv.config.checks import byte_size, clean, must, need

ADMIN_PORT = 9003
"""Port at which a master answers questions over HTTP, unless it is started with another one."""


def address(value: Any) -> tuple[str, int]:
    """Host and port of ``"host:port"``."""
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    right = bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536
    need(right, "be an address such as '10.0.0.1:50051'", value)
    return host.strip("[]"), int(port)


def _seconds(value: Any) -> float:
    need(type(value) in (int, float) and 0 < value <= 3600, "be seconds, at most 3600", value)
    return float(value)


def _is_plain(value: Any) -> bool:
    """Return True if a text may stand in the lists of names that a master takes and gives."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._-]+", value) is not None


_text = must("a text", lambda value: isinstance(value, str))
_name = must("a text that is not empty", lambda value: isinstance(value, str) and value != "")

CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "master": address,
    "host": _name,
    "protocol": _name,
    "devices": _text,
    "metadata": _name,
    "segment": byte_size,
    "buffer": byte_size,
    "replicas": must("an int from 1 on", lambda value: type(value) is int and value > 0),
    "namespace": must("letters, digits and any of ._-", _is_plain),
    "admin": address,
    "connect_s": _seconds,
}
OPTIONAL = ("host", "segment", "admin")
"""Parameters that may be None."""


@frozen
class Settings:
    """The parameters in lowered form.

    Attributes:
        master, admin: hosts and ports of the master, of its calls and of its questions over HTTP.
        host: by which others reach this process; None is found out.
        protocol, devices, metadata: of Mooncake's transfers.
        segment: bytes of memory of this process that are given to the store.
        buffer: bytes of registered memory of a call, for what is not in the host pool.
        replicas: of an object.
        namespace: before all keys.
        connect_s: seconds to wait for the master when it is first called.
    """

    master: tuple[str, int]
    protocol: str
    devices: str
    metadata: str
    buffer: int
    replicas: int
    namespace: str
    connect_s: float
    host: str | None = None
    segment: int = 0
    admin: tuple[str, int] | None = None

    @property
    def questions(self) -> tuple[str, int]:
        """Host and port at which the master answers questions."""
        return self.admin or (self.master[0], ADMIN_PORT)


def settings_of(params: Mapping[str, Any], reasons: list[str]) -> Settings | None:
    """The settings; None where something is wrong, and why goes to ``reasons``."""
    lacking = [name for name in CHECKS if params.get(name) is None and name not in OPTIONAL]
    reasons += [f"{name} must be set, got None" for name in lacking]
    good = clean(params, CHECKS, reasons)
    return None if reasons else Settings(**good)


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
