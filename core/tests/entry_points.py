"""Entry points of distributions that are not on disk."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace


class FakePoint(importlib.metadata.EntryPoint):
    """An entry point of version 9 of ``topkv-`` and its name, or of another package."""

    @classmethod
    def of(cls, package, name, value, group):
        point = cls(name, value, group)
        vars(point)["package"] = package
        return point

    @property
    def dist(self):
        return SimpleNamespace(name=vars(self).get("package", f"topkv-{self.name}"), version="9")
