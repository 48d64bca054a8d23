"""What a recording of a decoder depends on: its modules, their tensors, numbers and hooks."""

from __future__ import annotations

import json
from hashlib import blake2b
from itertools import chain
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.nn.modules import module as torch_module

from topkv_transformers.blocks import BlockIndex
from topkv_transformers.latent import LatentAttention

_OF_TORCH = set(vars(nn.Module()))
_PLAIN = (bool, int, float, str)
SAMPLES = 64
"""Elements of each tensor that ``digest_of`` looks at with their places."""

BESIDE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
"""Keys of a configuration that say where a model came from, and differ once it was saved."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@frozen
class Signature:
    """The modules of a decoder as they are; two are equal if a recording serves both.

    Attributes:
        modules: the modules themselves, which are compared by identity.
        tensors: address, dtype and shape of each parameter and buffer.
        values: numbers and texts that are attributes of modules, and lists and mappings of such.
            Adapters are switched and scaled by these.
    """

    modules: list[nn.Module]
    tensors: list[tuple[Any, ...]]
    values: list[Any]


def signature_of(decoder: nn.Module) -> Signature:
    """The signature of a decoder. Waits for nothing."""
    modules, tensors, values = list(decoder.modules()), [], []
    for module in modules:
        attributes = vars(module)
        for owned in (attributes["_parameters"], attributes["_buffers"]):
            tensors += [
                (tensor.data_ptr(), tensor.dtype, tensor.shape)
                for tensor in owned.values()
                if tensor is not None
            ]
        values += [attributes["training"]]
        values += [
            (name, value)
            for name, value in attributes.items()
            if type(value) in _PLAIN or (name not in _OF_TORCH and _holds_plain(value))
        ]
    return Signature(modules, tensors, _copied(values))


def _holds_plain(value: Any) -> bool:
    if type(value) is dict:
        value = value.values()
    elif type(value) not in (list, tuple, set):
        return False
    return all(type(each) in _PLAIN for each in value)


def _copied(values: list[Any]) -> list[Any]:
    """Values that later changes of lists and mappings do not reach."""
    return [(each[0], type(each[1])(each[1])) if type(each) is tuple else each for each in values]


def is_hooked(decoder: nn.Module) -> bool:
    """Whether something that a replay would leave out watches or replaces modules inside.

    Hooks of the decoder itself run with every call. Those of Transformers collect what a call
    asks for, and such calls are not replayed.
    """
    if any(getattr(torch_module, f"_global{hooks}") for hooks in _HOOKS):
        return True
    for module in decoder.modules():
        if module is decoder:
            continue
        replaced = module.__dict__.get("forward")
        if replaced is not None and not isinstance(replaced, (LatentAttention, BlockIndex)):
            return True
        hooks = chain.from_iterable(getattr(module, name).values() for name in _HOOKS)
        if not all(map(_of_transformers, hooks)):
            return True
    return False


def _of_transformers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def digest_of(decoder: nn.Module) -> str:
    """A hash over all that keys and values follow from beside tokens, equal in every process.

    That is the configuration, modules with their plain numbers, and parameters and buffers: some
    elements of each with their places, and all of them without. Reads all weights once.
    """
    digest = blake2b(digest_size=16)
    config = getattr(decoder, "config", None)
    told = config.to_dict() if config is not None else {}
    told = {name: value for name, value in told.items() if name not in BESIDE}
    digest.update(json.dumps(told, sort_keys=True, default=str).encode())
    for name, module in decoder.named_modules():
        numbers = sorted(
            (key, repr(value))
            for key, value in vars(module).items()
            if type(value) in (int, float) and not key.startswith("_")
        )
        digest.update(f"{name} {type(module).__qualname__} {numbers}".encode())
    for name, tensor in [*decoder.named_parameters(), *decoder.named_buffers()]:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].contiguous().cpu()
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
        raw = flat.contiguous().view(torch.uint8)
        whole = raw[: len(raw) // 8 * 8].view(torch.int64)
        if len(whole):
            digest.update(torch.hash_tensor(whole).cpu().numpy().tobytes())
        digest.update(raw[len(raw) // 8 * 8 :].cpu().numpy().tobytes())
    return digest.hexdigest()
