"""The parameters of the storage, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen

from topkv.config.checks import clean, must, need

PASSWORD = "TOPKV_REDIS_PASSWORD"
"""Environment variable of the password, where no parameter names one."""


def _address(value: Any) -> str | tuple[str, int]:
    """Host and port of ``"host:port"``, or the path of ``"unix:/path"``."""
    if isinstance(value, str) and value.startswith("unix:/"):
        return value.removeprefix("unix:")
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    right = bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536
    need(right, "be an address such as '10.0.0.1:6379' or 'unix:/run/redis.sock'", value)
    return host.strip("[]"), int(port)


def _seconds(value: Any) -> float:
    need(type(value) in (int, float) and 0 < value <= 3600, "be seconds, at most 3600", value)
    return float(value)


def _is_plain(value: Any) -> bool:
    """Return True if a text has no character that means something in a pattern of Redis."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9._-]+", value) is not None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _secret(value: Any) -> str:
    if not isinstance(value, str) or not value:  # which must not be shown
        raise ValueError(f"must be a text that is not empty, got {type(value).__name__}")
    return value


CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "address": _address,
    "username": must("a text that is not empty", _is_text),
    "password": _secret,
    "database": must("an int from 0 on", lambda value: type(value) is int and value >= 0),
    "namespace": must("letters, digits and any of ._-", _is_plain),
    "expire_s": must("an int of seconds", lambda value: type(value) is int and value > 0),
    "timeout_s": _seconds,
}
OPTIONAL = ("username", "password", "expire_s")
"""Parameters that may be None."""


@frozen
class Settings:
    """The parameters in lowered form.

    Attributes:
        address: host and port, or the path of a socket.
        database: its number.
        namespace: before all keys.
        timeout_s: seconds for which the server may be silent.
        username, password: of whoever asks, where the server wants to know.
        expire_s: seconds after which an object goes; None if it stays.
    """

    address: str | tuple[str, int]
    database: int
    namespace: str
    timeout_s: float
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    expire_s: int | None = None

    @property
    def where(self) -> str:
        """The address, for people."""
        if isinstance(self.address, str):
            return self.address
        host, port = self.address
        return f"{host}:{port}"


def settings_of(params: Mapping[str, Any], reasons: list[str]) -> Settings | None:
    """The settings; None where something is wrong, and why goes to ``reasons``."""
    params = {**params, "password": params.get("password") or os.environ.get(PASSWORD) or None}
    lacking = [name for name in CHECKS if params.get(name) is None and name not in OPTIONAL]
    reasons += [f"{name} must be set, got None" for name in lacking]
    good = clean(params, CHECKS, reasons)
    if params.get("username") and not params["password"]:
        reasons.append(f"username needs a password, in params or in the environment ({PASSWORD})")
    return None if reasons else Settings(**good)
