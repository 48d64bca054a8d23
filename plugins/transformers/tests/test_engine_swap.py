"""The swap path is exact: the stock model under a mask that allows the recorded selection.

Selections are recorded where the algorithm writes them, in front of everything that this test is
about: plan, load, eviction, write-back, page table and attention.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import topkv

UNIT, BUDGET, BUFFER, WARM_UP, STEPS = 4, 24, 32, 8, 64
PROMPT = 4 * BUFFER + 13


class Recorder:
    """Recorder of the units that each lane selected in each step, and of counts of the plan."""

    def __init__(self, coordinator):
        self.coordinator = coordinator
        self.slots, self.selections, self.counts = None, {}, []
        for algorithm in {
            id(path.algorithm): path.algorithm for path in coordinator.layers
        }.values():
            if algorithm is not None:
                self._wrap(algorithm)

    def _wrap(self, algorithm):
        original = algorithm.retrieve_topk

        def recording(view, q, weights, out):
            found = original(view, q, weights, out)
            if not view.step.appended.any():
                return found  # the warm start: no row of the model asks here
            step = (found.ids.cpu().clone(), view.step.lengths.tolist())
            self.selections.setdefault(view.layer, []).append(step)
            if view.layer == max(path.view.layer for path in self.coordinator.layers):
                self.slots = view.step.slots.tolist()
            return found

        algorithm.retrieve_topk = recording

    def count(self):
        """Misses so far, and lanes' slots that are filled; of all sparse layers."""
        stores = self.coordinator.manager.stores
        sparse = [store for store in stores if store.group.residency == "sparse"]
        misses = sum(int(store.counters[..., 1].sum()) for store in sparse)
        filled = sum(int((store.slot_unit >= 0).sum()) for store in sparse)
        self.counts.append((misses, filled))

    def allowed(self, prompt, columns, kv_heads):
        """Columns that a query may attend, for each layer bool ``[B, Hkv, columns, columns]``."""
        pads = (prompt["attention_mask"].cpu() == 0).sum(1).tolist()
        column = torch.arange(columns)
        causal = column[None] <= column[:, None]
        real = column >= torch.tensor(pads)[:, None]
        # A padded query sees itself: it must see something, and nobody reads it.
        dense = causal & real[:, None] | torch.eye(columns, dtype=torch.bool)
        dense = dense[:, None].repeat(1, kv_heads, 1, 1)
        layers = []
        for path in self.coordinator.layers:
            allowed = dense.clone()
            for ids, lengths in self.selections.get(path.view.layer, []):
                self._allow(allowed, ids, lengths, pads)
            layers.append(allowed)
        return layers

    @staticmethod
    def _allow(allowed, ids, lengths, pads):
        rows, kv_heads = allowed.shape[:2]
        lanes = ids.view(rows, -1, ids.shape[-1]).expand(rows, kv_heads, -1)
        for row, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
            tail = (length - 1) // UNIT
            for head in range(kv_heads):
                line = torch.zeros(allowed.shape[-1], dtype=torch.bool)
                chosen = [unit for unit in lanes[row, head].tolist() if unit >= 0]
                assert max(chosen) < tail
                assert len(chosen) == len(set(chosen))
                for unit in (*chosen, tail):
                    line[pad + unit * UNIT : pad + min((unit + 1) * UNIT, length)] = True
                allowed[row, head, pad + length - 1] = line


def swap(tiny, check, family, pads=(0,), chunk=None, layers=2, **changes):
    model, prompt = tiny.model(family, layers=layers), tiny.prompt(PROMPT, pads)
    steps = WARM_UP + STEPS + 1  # the first token comes from the prefill
    settings = tiny.settings(capture="off", unit=UNIT, budget=BUDGET, buffer=BUFFER, **changes)
    with topkv.attach(model, settings) as handle:
        recorder = Recorder(handle.coordinator)
        hook = model.register_forward_hook(lambda *_: recorder.count())
        sequences, logits, cache = check.run(model, prompt, steps, prefill_chunk_size=chunk)
        hook.remove()
        allowed = recorder.allowed(prompt, sequences.shape[1] - 1, 2)
        assert recorder.slots == list(cache.slots)
        assert_swapped(handle, recorder, cache)
        cache.close()
        check.all_free(handle)
    allowed = [columns.to(tiny.device) for columns in allowed]
    truth = check.oracle(model, sequences, prompt, allowed=allowed)
    stock = check.oracle(model, sequences, prompt, torch.float32, allowed)
    check.close(logits, stock, truth)
    return model, prompt, sequences, logits


def assert_swapped(handle, recorder, cache):
    """Every one of the last 64 steps loaded units, and threw others out for them."""
    steps = recorder.counts[-STEPS - 1 :]
    for (misses, filled), (more, now_filled) in pairwise(steps):
        assert more > misses
        assert (more - misses) - (now_filled - filled) > 0
    report = handle.coordinator.transfers_of(cache.slots)
    assert 0 < report.hit_rate < 1
    stats = handle.stats()
    assert stats.transfers == report, "no other requests were there"
    assert stats.occupancy.used_slots == len(cache.slots)
    assert report.loaded_bytes == report.misses * UNIT * 64 * 2 * 4 * (
        2 // handle.config.groups[-1].shape.lane_heads
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "planned"])
@pytest.mark.parametrize("pads", [(0,), (0, 9, 2)], ids=["single", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_swap_path_is_exact(tiny, check, family, pads, fast):
    swap(tiny, check, family, pads, resident_fast_path=fast)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_after_a_chunked_prefill(tiny, check, family):
    swap(tiny, check, family, (0, 40, 2), chunk=37)


def test_shared_selection(tiny, check):
    swap(tiny, check, "llama", (0, 9), scope="shared")


@pytest.mark.parametrize("new", [19, 1], ids=["turn", "one_token"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "planned"])
def test_after_a_second_turn(tiny, check, new, fast):
    """Prefill follows decode, in mid-unit, over units that only decode has closed."""
    model, first = tiny.model(), tiny.prompt(PROMPT, (0, 6))
    settings = tiny.settings(
        capture="off", unit=UNIT, budget=BUDGET, buffer=BUFFER, resident_fast_path=fast
    )
    with topkv.attach(model, settings) as handle:
        recorder, cache = Recorder(handle.coordinator), handle.new_cache()
        sequences, _, _ = check.run(model, first, 30, past_key_values=cache)
        ids = torch.cat([sequences, tiny.prompt(new, (0, 0), seed=1)["input_ids"]], 1)
        grown = (0, ids.shape[1] - PROMPT)
        mask = torch.nn.functional.pad(first["attention_mask"], grown, value=1)
        prompt = {"input_ids": ids, "attention_mask": mask}
        sequences, logits, _ = check.run(model, prompt, 30, past_key_values=cache)
        allowed = recorder.allowed(prompt, sequences.shape[1] - 1, 2)
    allowed = [columns.to(tiny.device) for columns in allowed]
    truth = check.oracle(model, sequences, prompt, allowed=allowed)
    stock = check.oracle(model, sequences, prompt, torch.float32, allowed)
    check.close(logits, stock, truth)


@pytest.mark.parametrize("residency", ["resident", "streamed"])
def test_beside_dense_layers(tiny, check, residency):
    swap(tiny, check, "llama", (0, 9), 50, 3, dense_layers=[0], dense_residency=residency)


def test_the_oracle_sees_a_wrong_selection(tiny, check):
    """The test itself is sharp: dense attention gives other logits than the selection."""
    model, prompt, sequences, logits = swap(tiny, check, "llama")
    dense = check.oracle(model, sequences, prompt)
    assert (logits - dense).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off beside a GPU")
def test_kernels_and_reference_decode_alike(tiny, check):
    model, prompt = tiny.model(), tiny.prompt(45, (0, 7))
    settings = {"budget": 16, "buffer": 24, "max_requests": 2}
    settings |= {"max_tokens": 128, "max_request_tokens": 64}
    results = []
    for impl in ("reference", "triton"):
        with topkv.attach(model, tiny.settings(impl=impl, **settings)) as handle:
            assert handle.config.impl == impl
            results.append(check.run(model, prompt, 6)[:2])
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-4)
