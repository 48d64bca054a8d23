"""Plugins: which are installed, whether each can be used, and how an instance is made.

``registry`` is what this process has; a ``PluginRegistry`` of one's own has what it is handed.
What a package writes is public and stands elsewhere: its entries in ``topkv.entries``, the hooks
that return them in ``topkv.plugins.discovery``, those of each kind in ``topkv.hooks``.

Reading order: ``plugin_registry`` (plugins by kind and name, and how an instance is made),
``kinds`` (those that there are), ``records`` (packages are asked, and their answers become
records), ``entry_checks`` (what an entry may hold), ``contract`` (an instance against the specs of
its kind), ``project`` (packages that may be missing), ``builtin`` (what the core itself offers).
Nothing here imports torch or triton.
"""

from __future__ import annotations

from topkv.plugins.plugin_registry import PluginRegistry as PluginRegistry
from topkv.plugins.plugin_registry import registry as registry
from topkv.plugins.records import PluginRecord as PluginRecord

__all__ = ["PluginRecord", "PluginRegistry", "registry"]
