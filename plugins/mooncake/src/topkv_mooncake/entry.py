"""Entry of the plugin, through which topkv finds the storage ``mooncake``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt, le, matches_re, min_len, optional

from topkv import hookimpl
from topkv.checks import byte_size, need
from topkv.entries import Capabilities, PluginEntry
from topkv.parameters import passes

ADMIN_PORT = 9003
"""Port at which a master answers questions over HTTP, unless it is started with another one."""


def address(value: str) -> tuple[str, int]:
    """Host and port of ``"host:port"``."""
    host, colon, port = value.rpartition(":")
    right = bool(host and colon) and port.isdecimal() and 0 < int(port) < 65536
    need(right, "be an address such as '10.0.0.1:50051'", value)
    return host.strip("[]"), int(port)


@frozen
class MooncakeParams:
    """Parameters.

    Attributes:
        master: ``"host:port"`` of the master.
        host: by which others reach this process; None is found out.
        protocol, devices, metadata: of Mooncake's transfers.
        segment: bytes of memory of this process that are given to the store, or ``"16GiB"``; None
            for none.
        buffer: bytes of registered memory of a call, for what is not in the host pool.
        replicas: of an object.
        namespace: before all keys; letters, digits and any of ``._-``.
        admin: ``"host:port"`` at which the master answers questions over HTTP; by default the host
            of ``master``, and port 9003.
        connect_s: seconds to wait for the master when it is first called.
    """

    master: str = field(default="127.0.0.1:50051", validator=passes(address))
    host: str | None = field(default=None, validator=optional(min_len(1)))
    protocol: str = field(default="tcp", validator=min_len(1))
    devices: str = ""
    metadata: str = field(default="P2PHANDSHAKE", validator=min_len(1))
    segment: int | str | None = field(default=None, validator=optional(passes(byte_size)))
    buffer: int | str = field(default="16MiB", validator=passes(byte_size))
    replicas: int = field(default=1, validator=ge(1))
    # A master takes and gives names in lists.
    namespace: str = field(default="topkv", validator=matches_re(r"[A-Za-z0-9._-]+"))
    admin: str | None = field(default=None, validator=optional(passes(address)))
    connect_s: float = field(default=5.0, validator=[gt(0), le(3600)])

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of the master."""
        return address(self.master)

    @property
    def questions(self) -> tuple[str, int]:
        """Host and port at which the master answers questions."""
        return address(self.admin) if self.admin else (self.place[0], ADMIN_PORT)


@hookimpl
def topkv_register_storages() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="mooncake",
            kind="storage",
            factories="topkv_mooncake.storage:MooncakeStorage",
            hook_api=(3, 0),
            capabilities=Capabilities(tiers=("cpu",)),
            parameters=MooncakeParams,
            doctor="topkv_mooncake.library:describe",
        )
    ]
