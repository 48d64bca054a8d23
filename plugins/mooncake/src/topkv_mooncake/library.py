"""Search for Mooncake. It is known by what it offers, not by its version."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any

from attrs import frozen

from topkv_authoring.libraries import BROKEN, Places, UnusableError, in_one_line

MODULE, CLASS = "mooncake.store", "MooncakeDistributedStore"

NEEDED = {
    "setup": (),
    "close": (),
    "register_buffer": (),
    "batch_is_exist": (),
    "batch_put_from_multi_buffers": ("config",),
    "batch_get_into_multi_buffers": ("all_buffer_ptrs", "all_sizes"),
    "batch_remove": ("force",),
    "get_size": (),
}
"""Methods of its class, and the arguments that each must name."""

PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
"""Distributions of the module, one for machines without CUDA."""


@frozen
class Library:
    """Mooncake Store.

    Attributes:
        name: its module, and package and version where they are known.
        store: makes a client.
        config: makes the options of a put.
    """

    name: str
    store: Callable[[], Any]
    config: Callable[[], Any]


def _name() -> str:
    for package in PACKAGES:
        try:
            return f"{MODULE} of {package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return MODULE


def _load() -> Library:
    try:
        module = import_module(MODULE)
    except BROKEN as error:
        raise UnusableError(in_one_line(error, MODULE)) from error
    store = getattr(module, CLASS, None)
    reasons = [] if store else [f"it has no {CLASS}"]
    for name, arguments in NEEDED.items() if store else ():
        method = getattr(store, name, None)
        if method is None:
            reasons.append(f"{CLASS} has no {name}")
            continue
        # Compiled functions have no signature but in their documentation.
        reported = method.__doc__ or ""
        lacking = [repr(each) for each in arguments if f"{each}:" not in reported]
        if lacking:
            reasons.append(f"{name} takes no {', '.join(lacking)}")
    config = getattr(module, "ReplicateConfig", None)
    if config is None:
        reasons.append("it has no ReplicateConfig")
    if reasons or store is None or config is None:
        raise UnusableError(*reasons)
    return Library(_name(), store, config)


MOONCAKE = Places[Library](
    f"no Mooncake Store that serves it is here: pip install {PACKAGES[0]} ({PACKAGES[1]} with "
    "CUDA), and apt-get install libibverbs1 librdmacm1",
    {MODULE: _load},
)
describe = MOONCAKE.describe
