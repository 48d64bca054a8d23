"""A storage that is opened by its name, and whose calls are waited for."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, Self

import numpy as np

from topkv.config.sources import Resolver
from topkv.config.stages import Named
from topkv.errors import ConfigError, StorageError
from topkv.messages import raised
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as installed
from topkv_prefixes.calls import Workers, answer_of
from topkv_prefixes.settings import limit
from topkv_prefixes.storage import Storage, StorageSetup


class OpenedStorage:
    """A storage of its own, apart from that of any coordinator. Any thread; close it at the end.

    Args:
        name, params: name and parameters of the plugin, as of the setting ``storage``.
        object_bytes: bytes of the largest object there will be.
        limit_s: seconds after which a call counts as hung, above 0 and at most a day.
        registry: where the plugin is found; what is installed by default.

    Attributes:
        name: name of the plugin.

    Raises:
        ConfigError: a parameter is wrong, or the plugin refuses it.
        PluginError: there is no such plugin.
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any] | None,
        object_bytes: int,
        limit_s: float,
        registry: PluginRegistry | None = None,
    ) -> None:
        self.name, self._limit = name, limit_s
        known = registry or installed()
        self._who, reasons = known.get("storage", name).who, list[str]()
        _, asked = Resolver(known, reasons, {}).named("storage", Named(name, params or {}), "")
        try:
            limit(limit_s)
        except ValueError as error:
            reasons.append(f"limit_s {error}")
        if reasons:
            raise ConfigError(f"storage {name!r} cannot be opened", reasons)
        setup = StorageSetup(asked.params, object_bytes, np.zeros(0, dtype=np.uint8))
        self._storage: Storage = known.create("storage", name, setup)
        self._workers, self._hung, self._closed = Workers(1), "", False
        weakref.finalize(self, self._workers.close)

    def ask(self, head: str, hook: str, *arguments: Any) -> Any:
        """Call a hook on a thread of its own, and return its answer.

        Args:
            head: first line of errors.

        Raises:
            StorageError: the hook raises, gives a wrong answer, or takes longer than it may, after
                which nothing is asked any more; or this is a child of the process that has opened
                the storage.
        """
        if self._hung or self._closed or self._workers.forked:
            why = self._hung and f"a call to it hangs ({self._hung}); make another one"
            if self._workers.forked:
                why = "it is of the process that this one was forked from; make another one"
            why = why or "it is closed"
            raise StorageError(head, [f"{self} can be used no more: {why}"])
        answer: Future[Any] = Future()

        def job() -> None:
            try:
                found = getattr(self._storage, hook)(*arguments)
                answer.set_result(answer_of(hook, arguments, found))
            except BaseException as error:
                answer.set_exception(error)

        self._workers.add(job)
        if not wait([answer], self._limit).done:
            self._hung = hook
            reason = f"{hook} did not end within {self._limit} s; raise limit_s if it is slow"
            raise StorageError(head, [f"{self._who}: {reason}"])
        if (error := answer.exception()) is not None:
            reason = f"{hook}: {raised(error)}; fix that, and try again"
            raise StorageError(head, [f"{self._who}: {reason}"]) from error
        return answer.result()

    def close(self) -> None:
        """Let go of the storage; what is in it stays. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        until = time.monotonic() + (0 if self._hung else self._limit)
        while self._workers.busy and time.monotonic() < until:  # whoever waited was interrupted
            time.sleep(0.001)
        if self._workers.busy:
            warnings.warn(f"{self}: a call hangs and is left behind", RuntimeWarning, stacklevel=2)
        elif not self._workers.forked:
            self._storage.close()

    def __str__(self) -> str:
        return f"storage {self.name!r}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
