"""Every error that topkv raises on purpose.

A message says what was wrong, what was expected, what was got, whose it is, and how to fix
it. Where several things are wrong at once, all of them are in one error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

CONFIG_REFUSED = "the configuration is refused; nothing was allocated"
"""Head of the errors of configurations that nobody has acted on."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that memory ran out; on a CPU torch has no type for it."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "allocate memory" in str(error)


@contextmanager
def undone_by(call: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Call a function where the block raises, which then goes on; an interrupt counts too."""
    try:
        yield
    except BaseException:
        call(*args)
        raise


class TopkvError(Exception):
    """Base of all errors of topkv."""


class ReasonsError(TopkvError):
    """An error that gathers every reason before it is raised.

    Attributes:
        reasons: the single reasons, in the order in which they were found.
    """

    def __init__(self, head: str, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{head}:{lines}")


class ConfigError(ReasonsError):
    """The configuration is wrong; nothing was allocated."""


class PluginError(ReasonsError):
    """A plugin is unknown, did not load, or does not keep its contract."""


class CapabilityError(ReasonsError):
    """A plugin, model or option does not offer what was asked for."""


class StorageError(ReasonsError):
    """A storage did not take or give what was asked of it; nothing else has changed."""


class RequestError(TopkvError):
    """A call does not fit the state of the request or forward that it names."""


class OutOfMemory(TopkvError):
    """A tier has no room for what was asked; the state is as it was before the call."""


class HostMemoryError(OutOfMemory):
    """Too few free pages, or a host pool that would exceed its limit."""


class DeviceMemoryError(OutOfMemory):
    """Too few free request slots, or device buffers that would exceed their limit."""
