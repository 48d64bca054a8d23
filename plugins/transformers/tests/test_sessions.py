"""Caches that are written to a storage, and go on where they stopped."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import topkv
from topkv.errors import CapabilityError, ConfigError, HostMemoryError, RequestError, StorageError
from topkv_prefixes.stored import StoredSessions
from topkv_testing.integrity import check_integrity

SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False, "dense_layers": [1]}
ALGORITHMS = {
    "quest": {},
    "clusterkv": {"unit": 1, "budget": 64, "buffer": 64},
    "snapkv": {"unit": 1, "params": {"generated": 64, "window": 8}, "budget": 128, "buffer": 128},
    "double_sparsity": {"unit": 1},
    "streaming_llm": {},
    "pariskv": {"unit": 1},
    "pqcache": {"unit": 1, "params": {"window": 8, "segment": 64}},
    "rocketkv": {"unit": 4, "params": {"window": 8, "generated": 0}},
}


@pytest.fixture
def stored(tmp_path):
    """Sessions in a folder."""
    with StoredSessions("files", {"path": tmp_path / "stored", "sync": False}) as made:
        yield made


def settings_of(tiny, algorithm="quest", **changes):
    return tiny.settings(**{**SPARSE, "algorithm": algorithm, **ALGORITHMS[algorithm], **changes})


def turn(model, cache, ids, mask, steps):
    """Sequences, their mask, and logits."""
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        do_sample=False,
        max_new_tokens=steps,
        output_logits=True,
        return_dict_in_generate=True,
    )
    mask = torch.nn.functional.pad(mask, (0, steps), value=1)
    return output.sequences, mask, torch.stack(output.logits, 1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 21])
@pytest.mark.parametrize("host_format", ["model", "fp8"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_goes_on_to_the_bit(tiny, stored, algorithm, host_format, steps):
    """The model is attached anew, after prompt and steps, for rows of any padding."""
    model, prompt = tiny.model("qwen3", layers=3), tiny.prompt(75, (0, 30))
    settings = settings_of(tiny, algorithm, host_format=host_format)
    with topkv.attach(model, settings) as handle:
        cache = handle.new_cache()
        said, mask, _ = turn(model, cache, *prompt.values(), steps)
        twin = cache.fork()
        handle.suspend(cache, stored["chat"])
        assert cache.slots == ()
        expected = turn(model, twin, said, mask, 12)
        used = handle.coordinator.manager.host.used
    with topkv.attach(model, settings) as handle:
        for _ in range(2):  # the session stays
            resumed = handle.resume(stored["chat"])
            ours = turn(model, resumed, said, mask, 12)
            for one, other in zip(ours, expected, strict=True):
                assert torch.equal(one, other)
            assert handle.coordinator.manager.host.used == used
            check_integrity(handle.coordinator)
            resumed.close()
        assert handle.coordinator.manager.host.used == 0


@pytest.mark.parametrize("algorithm", ["quest", "clusterkv"])
def test_a_session_stays_until_it_is_discarded(tiny, tmp_path, algorithm):
    """A storage that is opened anew has it, and its name is taken."""
    model, prompt = tiny.model("qwen3", layers=3), tiny.prompt(75, (0, 30))
    settings = settings_of(tiny, algorithm)
    with (
        StoredSessions("files", {"path": tmp_path}) as stored,
        topkv.attach(model, settings) as handle,
    ):
        cache = handle.new_cache()
        said, mask, _ = turn(model, cache, *prompt.values(), 9)
        twin = cache.fork()
        handle.suspend(cache, stored["request 17"])
        assert cache.slots == ()
        with pytest.raises(StorageError, match="there is one of this name"):
            handle.suspend(twin, stored["request 17"])
        assert twin.slots
        expected = turn(model, twin, said, mask, 12)
    with (
        StoredSessions("files", {"path": tmp_path}) as stored,
        topkv.attach(model, settings) as handle,
    ):
        resumed = handle.resume(stored["request 17"])
        for one, other in zip(turn(model, resumed, said, mask, 12), expected, strict=True):
            assert torch.equal(one, other)
        check_integrity(handle.coordinator)
        stored["request 17"].discard()
        with pytest.raises(StorageError, match="it is not there; process the prompt again"):
            handle.resume(stored["request 17"])
    assert not [*tmp_path.glob("??/*")]


def suspended(tiny, place, model=None, **changes):
    """A session in a place: its model and settings, what was said, and what comes next."""
    model = model or tiny.model()
    prompt, settings = tiny.prompt(40), settings_of(tiny, **changes)
    with topkv.attach(model, settings) as handle:
        cache = handle.new_cache()
        said, mask, _ = turn(model, cache, *prompt.values(), 4)
        twin = cache.fork()
        handle.suspend(cache, place)
        return model, settings, (said, mask), turn(model, twin, said, mask, 6)[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", ["quest", pytest.param("clusterkv", marks=pytest.mark.nightly)]
)
def test_another_process_goes_on(tiny, tmp_path, algorithm):
    tiny.model().save_pretrained(tmp_path / "model")
    # Where weights are in memory can decide which instructions multiply them, and so the last bit.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").to(tiny.model().device)
    with StoredSessions("files", {"path": tmp_path / "stored"}) as stored:
        model, settings, (said, mask), expected = suspended(
            tiny, stored["chat"], model, algorithm=algorithm, **ALGORITHMS[algorithm]
        )
    torch.save([said.cpu(), mask.cpu(), settings], tmp_path / "said.pt")
    script = f"""
import sys, torch, topkv
from topkv_prefixes.stored import StoredSessions
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model").to({str(model.device)!r})
said, mask, settings = torch.load(sys.argv[1] + "/said.pt")
stored = StoredSessions("files", {{"path": sys.argv[1] + "/stored"}})
with topkv.attach(model, settings) as handle:
    read, forward = [], model.model.forward
    model.model.forward = lambda *a, **k: read.append(k["input_ids"].shape[1]) or forward(*a, **k)
    output = model.generate(
        input_ids=said.to(model.device), attention_mask=mask.to(model.device), do_sample=False,
        past_key_values=handle.resume(stored["chat"]), max_new_tokens=6,
        output_logits=True, return_dict_in_generate=True,
    )
stored.close()
assert read == [1] * 6, f"tokens were computed again: {{read}}"
torch.save(torch.stack(output.logits, 1).cpu(), sys.argv[1] + "/logits.pt")
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected.cpu())


def test_what_a_storage_has_lost_is_reported_and_takes_no_room(tiny, tmp_path):
    with StoredSessions("files", {"path": tmp_path}) as stored:
        model, settings, said, expected = suspended(tiny, stored["chat"])
        with topkv.attach(model, settings) as handle:
            for path in sorted(tmp_path.glob("??/*")):
                whole = path.read_bytes()
                for broken in (None, whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
                    path.unlink() if broken is None else path.write_bytes(broken)
                    with pytest.raises(StorageError, match="process the prompt again"):
                        handle.resume(stored["chat"])
                    assert handle.coordinator.manager.host.used == 0
                path.write_bytes(whole)
            assert torch.equal(turn(model, handle.resume(stored["chat"]), *said, 6)[2], expected)
        with (
            topkv.attach(model, {**settings, "unit": 2}) as handle,
            pytest.raises(CapabilityError, match="groups: it was suspended with"),
        ):
            handle.resume(stored["chat"])
        with torch.no_grad():
            model.model.layers[-1].self_attn.v_proj.weight *= 2
        with topkv.attach(model, settings) as handle:
            refused = r"the session 'chat' in storage 'files' cannot be resumed.*\n.*other weights"
            with pytest.raises(CapabilityError, match=refused):
                handle.resume(stored["chat"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unit": 2}, "groups"),
        ({"page_tokens": 32}, "page_tokens: it was suspended with 16, this model has 32"),
        ({"host_format": "fp8"}, "host_format"),
        ({"algorithm": "streaming_llm"}, "groups"),
        ({"params": {"metadata": "int8"}}, "groups"),
    ],
    ids=str,
)
def test_another_configuration_is_refused(tiny, stored, changes, reason):
    model, settings, _, _ = suspended(tiny, stored["chat"])
    with topkv.attach(model, {**settings, **changes}) as handle:
        with pytest.raises(CapabilityError, match="cannot be resumed") as refused:
            handle.resume(stored["chat"])
        assert any(reason in each for each in refused.value.reasons)


def test_other_weights_are_refused(tiny, stored):
    model, settings, _, _ = suspended(tiny, stored["chat"])
    with torch.no_grad():
        model.model.layers[-1].self_attn.v_proj.weight *= 2
    with (
        topkv.attach(model, settings) as handle,
        pytest.raises(CapabilityError, match="other weights"),
    ):
        handle.resume(stored["chat"])


def test_no_room_and_nothing_to_write(tiny, stored):
    model, settings, _, _ = suspended(tiny, stored["chat"])
    with topkv.attach(model, settings) as handle:
        with pytest.raises(RequestError, match="nothing to suspend"):
            handle.suspend(handle.new_cache(), stored["other"])
        kept = handle.resume(stored["chat"])
        for where in (None, 3, "chat"):
            with pytest.raises(ConfigError, match="must be a session of StoredSessions"):
                handle.suspend(kept, where)
            with pytest.raises(ConfigError, match="must be a session of StoredSessions"):
                handle.resume(where)
        assert kept.slots
        kept.close()
        prompt = tiny.prompt(525, (0, 0))
        full = handle.new_cache()
        turn(model, full, *prompt.values(), 4)
        with pytest.raises(HostMemoryError):
            handle.resume(stored["chat"])
        assert handle.coordinator.requests.free == 2
        full.close()
        assert handle.resume(stored["chat"]).slots
