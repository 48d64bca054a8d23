"""Arguments of SGLang from a configuration of topkv. Imports neither."""

from __future__ import annotations

import json
from os import PathLike
from typing import TYPE_CHECKING, Any

from topkv.errors import ConfigError
from topkv_engines.arguments import take_owned, twice_reasons

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

    loaded = SparseConfig() if config is None else SparseConfig.load(config)
    settings = loaded.as_dict()
    ours = {"attention_backend": BACKEND, **take_owned(settings, OWNED, arguments)}
    reasons = pages_reasons(settings) + twice_reasons(ours, arguments)
    settings.pop("pages", None)
    more = _override(arguments.pop("json_model_override_args", None), reasons)
    if SETTINGS in more:
        reasons.append(
            f"json_model_override_args holds a configuration of topkv ({SETTINGS}); hand over one"
        )
    if reasons:
        raise ConfigError("these arguments do not go together", reasons)
    override = json.dumps({**more, SETTINGS: settings})
    return {**arguments, **ours, "json_model_override_args": override}


def _override(text: str | None, reasons: list[str]) -> dict[str, Any]:
    """Read ``json_model_override_args``; add a reason if that is no object."""
    try:
        return dict(json.loads(text or "{}"))
    except (TypeError, ValueError) as error:
        reasons.append(f"json_model_override_args must be a JSON object: {error}")
        return {}
