"""Arguments of SGLang from a configuration of topkv. Imports neither."""

from __future__ import annotations

import json
from os import PathLike
from typing import TYPE_CHECKING, Any

from topkv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from topkv import SparseConfig

BACKEND = "topkv"
"""Name of the attention backend."""

SETTINGS = "topkv_settings"
"""Key of topkv's settings in ``json_model_override_args``, which reach every process of SGLang."""

OWNED = {
    "max_requests": "max_running_requests",
    "page_tokens": "page_size",
    "max_request_tokens": "context_length",
}
"""Settings of topkv that SGLang has names of its own for: it decides them, and topkv follows."""

PAGES = (
    "pages: the engine gives them out, keeps and finds them; leave it out. SGLang's radix cache "
    "has them found again unless disable_radix_cache=True. Nothing keeps pages below its pool: "
    "raise max_tokens, so that more of them stay in host memory, or decode through topkv.attach, "
    "which has storages"
)


def pages_reasons(stated: Mapping[str, Any]) -> list[str]:
    """The reason against another ``pages`` than the engine's."""
    return [PAGES] * (stated.get("pages", "engine") != "engine")


def engine_args(
    config: SparseConfig | Mapping[str, Any] | str | PathLike[str] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Arguments of ``sglang.Engine`` with which it decodes through topkv.

    Settings that both have get SGLang's name: ``max_requests`` becomes ``max_running_requests``,
    ``page_tokens`` becomes ``page_size`` and ``max_request_tokens`` becomes ``context_length``.

    Args:
        config: whatever ``SparseConfig.load`` takes; None for the defaults. ``max_tokens`` is what
            SGLang's pool holds, in tokens of all requests together.
        arguments: any others of SGLang; passed on.

    Raises:
        ConfigError: with everything that is set twice, or that topkv sets itself.
    """
    from topkv import SparseConfig
    from topkv.config.settings import DEFAULTS

    loaded = SparseConfig() if config is None else SparseConfig.load(config)
    settings = loaded.as_dict()
    ours: dict[str, Any] = {"attention_backend": BACKEND}
    for name, argument in OWNED.items():
        value = settings.pop(name, None)
        if value is None:
            value = None if argument in arguments else DEFAULTS[name]
        if value is not None:
            ours[argument] = value
    reasons = pages_reasons(settings)
    settings.pop("pages", None)
    for name in sorted(ours.keys() & arguments.keys()):
        if arguments[name] != ours[name]:
            reasons.append(
                f"{name} is {ours[name]!r} by the configuration of topkv and {arguments[name]!r} "
                "by the arguments; say it once"
            )
    more = json.loads(arguments.pop("json_model_override_args", None) or "{}")
    if SETTINGS in more:
        reasons.append(
            f"json_model_override_args holds a configuration of topkv ({SETTINGS}); hand over one"
        )
    if reasons:
        raise ConfigError("these arguments do not go together", reasons)
    override = json.dumps({**more, SETTINGS: settings})
    return {**arguments, **ours, "json_model_override_args": override}
