"""Questions to a master over HTTP: the keys that it knows, and the sizes of their objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from urllib.parse import quote

from topkv_mooncake.client import MooncakeError

TIMEOUT_S = 10.0

AT_ONCE = 32
"""Keys of one question; they are part of its address."""


def keys_of(where: tuple[str, int]) -> list[str]:
    """Return all keys that the master knows.

    Raises:
        MooncakeError: nobody answers there, or not like a master.
    """
    return _asked(where, "/get_all_keys").decode().split()


def sizes_of(where: tuple[str, int], keys: Sequence[str]) -> Iterator[int]:
    """Bytes of the first replica of each object, 0 of those that are gone."""
    for at in range(0, len(keys), AT_ONCE):
        names = ",".join(quote(key, safe="") for key in keys[at : at + AT_ONCE])
        reported = json.loads(_asked(where, f"/batch_query_keys?keys={names}"))["data"]
        for found in reported.values():
            values = found.get("values") or [{"size_": 0}]
            yield int(values[0]["size_"])


def _asked(where: tuple[str, int], path: str) -> bytes:
    host, port = where
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    except OSError as error:
        raise MooncakeError(
            f"the master answers no questions at {host}:{port}: {error}; its flag --metrics_port "
            "says where it does, and the parameter admin of the storage where it is asked"
        ) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise MooncakeError(f"http://{host}:{port}{path} answered {answer.status} {answer.reason}")
    return body
