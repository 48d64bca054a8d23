"""Entry of the plugin, through which topkv finds the storage ``redis``."""

from __future__ import annotations

import os

from attrs import field, frozen
from attrs.validators import ge, gt, le, matches_re, min_len, optional

from topkv import hookimpl
from topkv.checks import need
from topkv.entries import Capabilities, PluginEntry
from topkv.parameters import passes

PASSWORD = "TOPKV_REDIS_PASSWORD"
"""Environment variable of the password, where no parameter names one."""


def _place(value: str) -> str | tuple[str, int]:
    """Host and port of ``"host:port"``, or the path of ``"unix:/path"``."""
    if value.startswith("unix:/"):
        return value.removeprefix("unix:")
    host, colon, port = value.rpartition(":")
    right = bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536
    need(right, "be an address such as '10.0.0.1:6379' or 'unix:/run/redis.sock'", value)
    return host.strip("[]"), int(port)


@frozen
class RedisParams:
    """Parameters.

    Attributes:
        address: ``"host:port"``, or ``"unix:/path"`` of a socket.
        username: of whoever asks, where the server wants to know.
        password: likewise; by default that of the environment (``PASSWORD``).
        database: its number.
        namespace: before all keys; letters, digits and any of ``._-``.
        expire_s: seconds after which an object goes; None if it stays.
        timeout_s: seconds for which the server may be silent.
    """

    address: str = field(default="127.0.0.1:6379", validator=passes(_place))
    username: str | None = field(default=None, validator=optional(min_len(1)))
    password: str | None = field(default=None, validator=optional(min_len(1)), repr=False)
    database: int = field(default=0, validator=ge(0))
    # No character that means something in a pattern of Redis.
    namespace: str = field(default="topkv", validator=matches_re(r"[A-Za-z0-9._-]+"))
    expire_s: int | None = field(default=None, validator=optional(gt(0)))
    timeout_s: float = field(default=10.0, validator=[gt(0), le(3600)])

    def __attrs_post_init__(self) -> None:
        if self.username and not self.secret:
            raise ValueError(
                f"username needs a password, in params or in the environment ({PASSWORD})"
            )

    @property
    def place(self) -> str | tuple[str, int]:
        """Host and port, or the path of a socket."""
        return _place(self.address)

    @property
    def secret(self) -> str | None:
        """The password."""
        return self.password or os.environ.get(PASSWORD) or None

    @property
    def where(self) -> str:
        """The address, for people."""
        return self.address.removeprefix("unix:")


@hookimpl
def topkv_register_storages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="redis",
            kind="storage",
            factories="topkv_redis.storage:RedisStorage",
            hook_api=(3, 0),
            capabilities=Capabilities(tiers=("cpu",)),
            parameters=RedisParams,
        )
    ]
