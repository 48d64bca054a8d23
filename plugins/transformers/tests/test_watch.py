"""Inputs of a page: every change of a model is seen, and every byte is in its digest."""

from __future__ import annotations

import copy
import functools
import threading

import numpy as np
import pytest
import torch
from adapted import CHANGES, adapted, change
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import topkv
from tests.machines.kept import keeping
from topkv.errors import CapabilityError, RequestError
from topkv_prefixes.stored import StoredSessions
from topkv_transformers import contents
from topkv_transformers.contents import contents_of
from topkv_transformers.watch import ModelWatch


def watched(model):
    return ModelWatch(model, model.model)


def keys_of(model, ids):
    """The keys of every layer, of the stock model."""
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    return torch.stack([layer.keys for layer in cache.layers])


def test_whatever_changes_keys_is_seen(tiny):
    model = adapted(tiny.model())
    ids = tiny.prompt(8)["input_ids"]
    watch, known = watched(model), {}
    changes = st.lists(st.tuples(st.sampled_from([*CHANGES]), st.integers(0, 3)), max_size=3)

    @given(changes)
    def check(changes):
        before, keys = watch.look(), keys_of(model, ids)
        assert watch.look() is before  # a forward is no change
        digest = watch.digest()
        for kind, value in changes:
            change(model, kind, value)
        now = keys_of(model, ids)
        after = watch.look()
        if not torch.equal(now, keys):
            assert after is not before
            assert watch.digest() != digest
        # A digest is that of the same keys wherever it is met again, and of a copy.
        assert torch.equal(known.setdefault(watch.digest(), now), now)
        assert watched(copy.deepcopy(model)).digest() == watch.digest()

    check()
    assert len(known) > 10


def test_a_digest_knows_bytes_and_their_places():
    @given(
        st.integers(1, 70),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
        st.data(),
    )
    def check(rows, dtype, data):
        tensor = torch.randint(-100, 100, (rows, 3)).to(dtype)
        other = tensor.clone()
        row = data.draw(st.integers(0, rows - 1))
        match data.draw(st.sampled_from(["swap", "sign", "one", "none", "shape", "strides"])):
            case "swap":
                other[[0, row]] = other[[row, 0]]
            case "sign":
                other[[0, row]] *= -1
            case "one":
                other[row, data.draw(st.integers(0, 2))] += 1
            case "shape":
                other = other.reshape(3, rows)
            case "strides":
                other = other.T.contiguous().T
        same = tensor.shape == other.shape and torch.equal(tensor, other)
        module = nn.Module()
        digests = []
        for each in (tensor, other):
            module.plain = each
            digests.append(ModelWatch(module, module).digest())
        assert (digests[0] == digests[1]) == same

    check()


def test_what_stays_is_not_read_again(tiny, monkeypatch):
    model = adapted(tiny.model())
    watch, read = watched(model), []

    def counted(tensors):
        read.append(len(tensors))
        return contents_of(tensors)

    monkeypatch.setattr("topkv_transformers.watch.contents_of", counted)
    first = watch.digest()
    change(model, "flag", 1)
    watch.look()
    assert watch.digest() != first
    change(model, "buffer", 1)
    watch.look()
    watch.digest()
    assert read[1:] == [0, 1]


def test_an_address_that_is_used_again_is_another_tensor(tiny):
    """The allocator gives a freed block to the next tensor of its size."""
    module = nn.Module()
    watch = ModelWatch(module, module)
    digests = set()
    for value in range(20):
        module.plain = None
        module.plain = torch.full((1000,), float(value))
        watch.look()
        digests.add(watch.digest())
    assert len(digests) == 20


class Opaque:
    __slots__ = ()


def test_what_cannot_be_watched_is_named(tiny):
    cases = {
        "Opaque is not read": ("thing", Opaque()),
        "made under torch.inference_mode()": ("plain", _made_in_inference_mode()),
        "a NumPy array of 4000000 bytes": ("array", np.zeros(500_000)),
    }
    for why, (name, value) in cases.items():
        model = adapted(tiny.model())
        setattr(model.model.layers[0].self_attn.k_proj, name, value)
        (reason,) = watched(model).look().unsure
        assert why in reason
        assert f"layers.0.self_attn.k_proj.{name}" in reason
        with pytest.raises(CapabilityError, match="pages: prefixes cannot be served") as refused:
            topkv.attach(model, tiny.settings(pages=keeping()))
        assert reason in refused.value.reasons
        assert not hasattr(model.model, "_topkv_handle")


def _made_in_inference_mode():
    with torch.inference_mode():
        return torch.zeros(3)


def test_objects_of_many_kinds_are_read_once_and_without_end(tiny):
    model = adapted(tiny.model())
    module = model.model.layers[0].self_attn.k_proj
    looped = {"self": module, "lock": threading.Lock(), "kind": torch.float32, "set": {3, 1}}
    looped["again"] = looped
    module.things = [looped, functools.partial(len, looped), module.forward, np.arange(5)]
    number = [3]
    module.closure = lambda: number
    watch = watched(model)
    seen = [watch.look()]
    for write in (
        lambda: looped["set"].add(7),
        lambda: module.things[3].__setitem__(0, 9),
        lambda: number.append(4),
        lambda: looped.__setitem__("kind", torch.float16),
    ):
        write()
        seen.append(watch.look())
    assert seen[0].unsure == []
    assert len({id(each) for each in seen}) == 5


@pytest.mark.parametrize("where", ["inside", "decoder", "model", "replaced"])
def test_hooks_that_may_change_keys_make_a_state_unsure(tiny, where):
    model = adapted(tiny.model())
    with topkv.attach(model, tiny.settings(pages=keeping())) as handle:
        look = handle.requests.watch.look
        assert look().unsure == []
        if where == "replaced":
            model.forward = functools.partial(type(model).forward, model)
        else:
            module = {"inside": model.model.layers[0], "decoder": model.model, "model": model}
            hook = module[where].register_forward_pre_hook(lambda *_: None)
        assert len(look().unsure) == 1
        if where == "replaced":
            del model.forward
        else:
            hook.remove()
        assert look().unsure == []


def test_a_write_that_is_not_counted_needs_a_word(tiny):
    model = adapted(tiny.model())
    watch = watched(model)
    before, digest = watch.look(), watch.digest()
    model.model.embed_tokens.weight.data.mul_(2)
    assert watch.look() is before
    watch.renew()
    assert watch.look() is not before
    assert watch.digest() != digest


@pytest.mark.gpu
def test_contents_are_those_of_the_host():
    tensors = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in (0, 1, 7, 100_000_001)]
    tensors.append(torch.randn(300, 200, device="cuda").T)
    assert tensors[3].nbytes > contents.CHUNK
    assert contents_of(tensors) == contents_of([each.cpu() for each in tensors])


def test_a_cache_belongs_to_the_model_that_filled_it(tiny, tmp_path):
    """A cache can be suspended before a change alone; a cache of two states is nobody's."""
    model, prompt = adapted(tiny.model()), tiny.prompt(40)
    with (
        StoredSessions("files", {"path": tmp_path}) as stored,
        topkv.attach(model, tiny.settings()) as handle,
    ):
        for between in (False, True):
            cache = handle.new_cache()
            model(prompt["input_ids"], past_key_values=cache)
            change(model, "flag", 1)
            if between:
                model(prompt["input_ids"][:, :1], past_key_values=cache)
                change(model, "flag", 0)
            with pytest.raises(CapabilityError, match="have changed since the cache was filled"):
                handle.suspend(cache, stored["chat"])
            change(model, "flag", 0)
        assert not [*tmp_path.glob("??/*")]


def test_salts_part_prompts_and_are_checked(tiny):
    model, prompt = tiny.model(), tiny.prompt(40)
    with topkv.attach(model, tiny.settings(pages=keeping())) as handle:
        found = []
        for salt in (None, "a", b"a", "b", "a", ""):
            before = handle.prefixes.counts.found
            model.generate(**prompt, max_new_tokens=2, do_sample=False, cache_salt=salt)
            found.append(handle.prefixes.counts.found - before)
        assert found == [0, 0, 32, 0, 32, 32]
        with pytest.raises(RequestError, match="cache_salt: expected a text or bytes, got int"):
            model.generate(**prompt, max_new_tokens=2, cache_salt=7)
