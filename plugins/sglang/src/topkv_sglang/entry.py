"""Entry of the plugin, through which topkv finds the engine ``sglang``.

Processes of SGLang call ``sglang_register``.
"""

from __future__ import annotations

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_sglang.args import BACKEND


@hookimpl
def topkv_register_engines() -> list[PluginEntry]:
    return [
        PluginEntry(
            "sglang",
            "engine",
            "topkv_sglang.engine:SglangEngine",
            hook_api=(3, 0),
            capabilities=Capabilities(tiers=("cpu",)),
            doctor="topkv_sglang.versions:doctor",
        )
    ]


def sglang_register() -> None:
    """Give ``--attention-backend topkv`` a meaning. Changes nothing for those who do not say it.

    SGLang only logs what this raises, so a scheduler looks again whether everything is in place.
    """
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from topkv_sglang.hooks import HOOKS, make_backend

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(make_backend)
    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
