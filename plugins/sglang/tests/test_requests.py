"""Requests of SGLang's batches on a coordinator, without SGLang and without a model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tools.engines.tests.steps import PAGE, SHAPE, lowered
from topkv.errors import HostMemoryError, RequestError
from topkv_engines.session import Session
from topkv_sglang.drafts import chain_mask
from topkv_sglang.requests import ScheduledRequests, Step
from topkv_sglang.rows import Rows
from topkv_testing.integrity import check_integrity


class Pool(Rows):
    """Rows of three requests, without SGLang."""

    def __init__(self):
        self.req_to_token = torch.zeros(4, 4 * PAGE, dtype=torch.int32)
        self.req_generation = torch.zeros(4, dtype=torch.int64)
        self.page, self.ended, self.replaced = PAGE, [], {}

    def put(self, row, pages):
        """Let a row, which is another request's, have these pages."""
        self.req_generation[row] += 1
        self.write(row, pages)

    def write(self, row, pages):
        """Write pages into a row."""
        places = torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)
        self.req_to_token[row, : len(pages) * PAGE] = places.flatten().int()


class Engine:
    """A session on such rows, and steps of it."""

    def __init__(self):
        self.pool = Pool()
        self.session = Session(
            lambda: [*self.session.requests.tokens],
            lambda made: ScheduledRequests(made, self.pool),
        )
        self.session.allocate(lowered())
        self.requests, self.coordinator = self.session.requests, self.session.coordinator

    def run(self, **step):
        """Run a step: lists of rows, computed tokens, tokens and prefill."""
        made = Step(**step)
        self.session.run(made, self.execute)
        check_integrity(self.coordinator)

    def execute(self, step):
        assert self.session.forward(len(step.rows), sum(step.tokens)) == sum(step.tokens)
        for layer in SHAPE.layers:
            q, k, v = (torch.randn(sum(step.tokens), heads, 64) for heads in (4, 2, 2))
            self.session.attend(layer, q, k, v, torch.empty_like(q))

    def pages(self, row):
        """Pages that topkv has of a row."""
        return self.coordinator.requests.pages.of(self.requests.held[row].slot)


@pytest.fixture
def engine():
    return Engine()


def test_a_request_from_its_prompt_to_its_end(engine):
    """Chunks of a prompt, and decoding behind it: a page is taken when its first token comes."""
    engine.pool.put(1, [3, 5, 2])
    engine.run(rows=[1], computed=[0], tokens=[PAGE], prefill=[PAGE + 8])
    assert engine.pages(1) == [3]
    engine.run(rows=[1], computed=[PAGE], tokens=[8], prefill=[PAGE + 8])
    assert not engine.requests.decoded
    engine.run(rows=[1], computed=[PAGE + 8], tokens=[1], prefill=[PAGE + 8])
    assert engine.requests.decoded == [0]
    assert engine.pages(1) == [3, 5]
    engine.pool.note_ended([1])
    assert engine.requests.held
    engine.requests.release()
    assert not engine.requests.held
    assert engine.coordinator.manager.host.used == 0


def test_prompts_stand_in_front_of_decoding(engine):
    """SGLang's order of a mixed step; which rows decode follows from what is computed."""
    engine.pool.put(1, [1, 2])
    engine.pool.put(2, [3, 4])
    engine.run(rows=[1], computed=[0], tokens=[9], prefill=[9])
    engine.run(rows=[2, 1], computed=[0, 9], tokens=[40, 1], prefill=[50, 9])
    assert engine.requests.decoded == [1]
    engine.run(rows=[2, 1], computed=[40, 10], tokens=[10, 1], prefill=[50, 9])
    engine.run(rows=[1, 2], computed=[11, 50], tokens=[1, 1], prefill=[9, 50])
    assert engine.requests.decoded == [0, 1]


def test_a_row_that_was_given_back_ends_before_its_pages_are_used_again(engine):
    """Another request gets the row and the pages at once."""
    engine.pool.put(1, [1, 2])
    engine.run(rows=[1], computed=[0], tokens=[40], prefill=[40])
    engine.pool.note_ended([1])
    engine.pool.put(1, [2, 1])
    engine.run(rows=[1], computed=[0], tokens=[40], prefill=[40])
    assert engine.pages(1) == [2, 1]


def test_a_row_that_was_given_on_without_a_word_is_an_error(engine):
    engine.pool.put(1, [1])
    engine.run(rows=[1], computed=[0], tokens=[9], prefill=[9])
    engine.pool.put(1, [1])
    with pytest.raises(RequestError, match="row 1 of SGLang's pool was given to another"):
        engine.run(rows=[1], computed=[9], tokens=[1], prefill=[9])


def test_pages_are_replaced_before_others_get_them(engine):
    """Two requests have read the same page; the cache keeps the first one's, and gives the other
    page to a third request, which writes it."""
    engine.pool.put(1, [1])
    engine.pool.put(2, [2, 3])
    engine.run(rows=[1, 2], computed=[0, 0], tokens=[PAGE, PAGE + 4], prefill=[PAGE, PAGE + 4])
    before = engine.pool.pages(2, 0, PAGE)
    engine.pool.write(2, [1, 3])
    engine.pool.note_replaced(2, 0, before)
    assert engine.pool.replaced == {2: (0, 1)}
    engine.pool.put(3, [2])
    engine.run(rows=[3, 2], computed=[0, PAGE + 4], tokens=[9, 1], prefill=[9, PAGE + 4])
    assert engine.pages(2) == [1, 3]
    assert engine.requests.replaced == 1
    engine.pool.put(2, [2])
    with pytest.raises(HostMemoryError, match="pages that no other request holds"):
        Engine.run(engine, **second_writer(engine))


def second_writer(engine):
    """A step in which a request begins with a page that another one holds, and writes it."""
    engine.pool.note_ended([2])
    return {"rows": [2], "computed": [0], "tokens": [9], "prefill": [9]}


def test_pages_of_a_row_that_ended_are_not_replaced(engine):
    engine.pool.put(1, [1])
    before = engine.pool.pages(1, 0, PAGE)
    engine.pool.write(1, [2])
    engine.pool.note_replaced(1, 0, before)
    engine.pool.note_ended([1])
    assert engine.pool.replaced == {}


def test_found_pages_are_shared(engine):
    engine.pool.put(1, [1, 2])
    engine.run(rows=[1], computed=[0], tokens=[PAGE + 3], prefill=[PAGE + 3])
    engine.pool.put(2, [1, 3])
    engine.run(rows=[2], computed=[PAGE], tokens=[5], prefill=[PAGE + 5])
    assert engine.requests.found == PAGE
    assert engine.pages(2) == [1, 3]


def batch(mode, **more):
    """A batch of SGLang's, as far as it is read."""
    requests = [SimpleNamespace(full_untruncated_fill_ids=[0] * n) for n in (9, 40)]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(
            is_decode=lambda: mode == "decode", is_target_verify=lambda: mode == "verify"
        ),
        req_pool_indices_cpu=torch.tensor([2, 1]),
        reqs=requests,
        **more,
    )


def test_steps_are_read_off_batches():
    decode = Step.of(batch("decode", seq_lens_cpu=torch.tensor([10, 41])))
    assert decode == Step([2, 1], [9, 40], [1, 1], [9, 40])
    drafts = SimpleNamespace(draft_token_num=3)
    verify = Step.of(batch("verify", seq_lens_cpu=torch.tensor([9, 40]), spec_info=drafts))
    assert verify == Step([2, 1], [9, 40], [3, 3], [9, 40])
    extend = Step.of(batch("extend", prefix_lens=[0, 32], extend_lens=[9, 8]))
    assert extend == Step([2, 1], [0, 32], [9, 8], [9, 40])


def test_trees_of_drafts_become_chains():
    """Each draft sees those before it, and itself."""
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=np.uint8)
    chains = chain_mask(np.concatenate([tree.ravel()] * 2), 3)
    chain = [1, 0, 0, 1, 1, 0, 1, 1, 1]
    assert chains.tolist() == chain * 2
    assert chains.dtype == tree.dtype
