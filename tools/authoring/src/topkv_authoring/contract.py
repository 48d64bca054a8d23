"""The error of a class that does not keep the contract of its base class."""

from __future__ import annotations

from importlib.metadata import packages_distributions, version

from topkv.errors import PluginError


def broken_contract(cls: type, page: str, reason: str) -> PluginError:
    """Return the error of a class, with the distribution that it comes from and its version.

    Args:
        page: module of this package that has the contract.
        reason: what was expected and got, and how to fix it.
    """
    top = cls.__module__.partition(".")[0]
    found = [f"{name} {version(name)}, " for name in packages_distributions().get(top, ())[:1]]
    whose = f"{''.join(found)}{cls.__module__}.{cls.__qualname__}"
    return PluginError(f"{whose} does not keep the contract of topkv_authoring.{page}", [reason])
