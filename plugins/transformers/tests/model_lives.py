"""Lives of an attached model that changes between prompts, beside a stock model that does alike.

Prompts begin alike, over caches of their own or kept ones, at once or in chunks, under salts.
Between them weights, buffers, flags, texts and adapters change, caches are suspended and resumed,
the handle is taken off and put on again, and another process finds and stores pages in the same
folder, with a model that went through the same changes or through one more.

    python model_lives.py --lives 2000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import adapted
import loras
import torch
from adapted import stock_of
from attrs import define, field
from elsewhere import asked
from hypothesis import strategies as st

import topkv
from tests.machines.kept import keeping
from topkv.errors import CapabilityError
from topkv_prefixes.stored import StoredSessions
from topkv_testing.integrity import check_integrity

SALTS = (None, "a")
HOW = ("fresh", "fresh", "chunks", "kept", "other history", "rendered", "direct")

asks = st.tuples(
    st.just("ask"),
    st.sampled_from(HOW),
    st.sampled_from([(3, 0), (3, 1), (2, 1), (1, 2), (0, 3)]),
    st.sampled_from(SALTS),
)
others = st.sampled_from([("again",), ("session",), ("close",)])

KINDS = {
    "values of every kind": (adapted.adapted, adapted.change, adapted.CHANGES),
    "adapters of PEFT": (loras.with_loras, loras.change, loras.LORA_CHANGES),
}
"""A kind makes a model out of a plain one, and changes it by name and number."""


def lives_of(kind, processes=False):
    """Actions of a life, some of them in another process if there is one."""
    changes = st.tuples(st.sampled_from([*KINDS[kind][2]]), st.integers(0, 3))
    here = st.builds(lambda change: ("change", *change), changes)
    actions = [asks, asks, asks, here, others]
    if processes:
        words = st.sampled_from([(3, 0), (2, 1)])
        there = (st.just("elsewhere"), words, st.sampled_from(SALTS), st.none() | changes)
        actions.append(st.tuples(*there))
    return st.lists(st.one_of(actions), min_size=4, max_size=16)


@define
class Counts:
    """Counts of what lives did.

    Attributes:
        found: lives in which pages were found.
        asked: prompts that were compared with the stock model.
        refused: sessions that were refused because the model had changed.
        elsewhere: prompts of the other process, and those of them for which it found pages.
    """

    lives: int = 0
    found: int = 0
    asked: int = 0
    refused: int = 0
    elsewhere: list[int] = field(factory=lambda: [0, 0])


@define
class Life:
    """One life.

    Args:
        tiny: makes models, see ``conftest.Tiny``.
        settings: of ``attach``.
        folder: of sessions.
        kind: of the model.
    """

    tiny: object
    settings: dict
    folder: Path
    counts: Counts
    kind: str
    changes: list = field(factory=list)
    model: object = field(init=False)
    stock: object = field(init=False)
    handle: object = field(init=False)
    cache: object = None
    said: torch.Tensor | None = None
    given: torch.Tensor | None = None
    sound: bool = False  # the kept cache was filled by the model as it is now

    def __attrs_post_init__(self):
        self.model = KINDS[self.kind][0](self.tiny.model(layers=2))
        self.stock = stock_of(self.model)
        self.handle = topkv.attach(self.model, self.settings)

    def run(self, actions):
        found = 0
        try:
            for number, (kind, *rest) in enumerate(actions):
                before = self.handle.prefixes.counts.found
                getattr(self, kind)(number, *rest)
                found += max(0, self.handle.prefixes.counts.found - before)
                check_integrity(self.handle.coordinator)
        finally:
            self.handle.detach()
        self.counts.lives += 1
        self.counts.found += found > 0

    def prompt(self, same, other):
        """Ids of which the first pages are those of other prompts."""
        pages = [self.tiny.prompt(16, seed=n)["input_ids"] for n in range(same)]
        pages += [self.tiny.prompt(16, seed=10 * other + n)["input_ids"] for n in range(4 - same)]
        return torch.cat([*pages, self.tiny.prompt(5, seed=99 + other)["input_ids"]], 1)

    def ask(self, number, how, words, salt):
        ids, options = self.prompt(*words), {"cache_salt": salt}
        if how in ("kept", "other history", "direct"):
            self.further(number, how, ids, options)
            return
        if how == "chunks":
            options["prefill_chunk_size"] = 16
        if how == "rendered" and self.given is not None:  # what a kept cache was said to hold
            ids = torch.cat([self.given, ids[:, -5:]], 1)
        self.compare(ids, self.answer(self.model, ids, **options))

    def further(self, number, how, ids, options):
        """A turn over the cache that is kept, or the first one."""
        if self.cache is None:
            self.cache, self.said, self.sound = self.handle.new_cache(), ids[:, :0], True
        said = torch.cat([self.said, ids], 1)
        if said.shape[1] > 300:
            self.close(number)
            return
        given = said
        if how == "other history" and self.said.shape[1]:
            given = torch.cat([self.said.flip(1), ids], 1)  # the cache keeps what it was fed
        self.given = given
        if how == "direct":
            with torch.no_grad():
                logits = self.model(ids, past_key_values=self.cache).logits[:, -1:]
            self.said = said
        else:
            sequences, logits = self.answer(
                self.model, given, past_key_values=self.cache, **options
            )
            self.said = torch.cat([said, sequences[:, given.shape[1] :]], 1)
            self.said = self.said[:, : self.cache.get_seq_length()]
        if self.sound:
            self.compare(said, (None, logits))

    def compare(self, ids, ours):
        """The first logits of an answer, which follow from all keys of the prompt."""
        stock = self.answer(self.stock, ids, steps=1)[1]
        torch.testing.assert_close(ours[1][:, :1], stock, rtol=2e-4, atol=2e-4)
        self.counts.asked += 1

    @staticmethod
    def answer(model, ids, steps=12, **options):
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        if "past_key_values" not in options and hasattr(output.past_key_values, "close"):
            output.past_key_values.close()
        return output.sequences, torch.stack(output.logits, 1)

    def change(self, number, kind, value):
        watch = self.handle.requests.watch
        before = watch.look()
        for model in (self.model, self.stock):
            KINDS[self.kind][1](model, kind, value)
        self.changes.append((kind, value))
        self.sound = self.sound and watch.look() is before

    def session(self, number):
        """The kept cache is suspended and resumed, unless the model has changed."""
        if self.cache is None or not self.cache.get_seq_length():
            return
        with StoredSessions("files", {"path": self.folder / "sessions", "sync": False}) as stored:
            try:
                self.handle.suspend(self.cache, stored[str(number)])
            except CapabilityError:
                assert not self.sound
                self.counts.refused += 1
                return
            assert self.sound
            self.cache = self.handle.resume(stored[str(number)])

    def elsewhere(self, number, words, salt, further):
        """Another process asks with a model that is alike, or has changed further."""
        if "storage" not in self.settings["pages"]["params"]:
            return
        changes = [*self.changes, *([further] if further else [])]
        ids = self.prompt(*words)[0].tolist()
        device = self.tiny.device.type
        found, apart = asked(device, self.kind, changes, self.settings, ids, salt)
        assert apart <= 2e-4, apart
        self.counts.elsewhere[0] += 1
        self.counts.elsewhere[1] += found > 0

    def close(self, number):
        if self.cache is not None:
            self.cache.close()
        self.cache, self.sound = None, False

    def again(self, number):
        """Another process finds what the storage has, if there is one."""
        self.close(number)
        self.handle.detach()
        self.handle = topkv.attach(self.model, self.settings)


def settings_of(tiny, storage, policy, path):
    """Settings under which everything is attended, and all pages are kept."""
    pages = keeping(keep=policy)
    if storage:
        below = {"name": "files", "params": {"path": str(path)}, "least_tokens": 1}
        pages["params"]["storage"] = {**below, "fetch": "wait_complete"}
    return tiny.settings(pages=pages, max_requests=3, max_tokens=1600)


def live(tiny, actions, storage, policy, counts, kind="values of every kind"):
    """Run one life in folders of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(tiny, storage, policy, Path(folder) / "pages")
        Life(tiny, settings, Path(folder), counts, kind).run(actions)


def main(arguments):
    """Run many lives, half of them of either kind of model."""
    from hypothesis import given, seed, settings

    from conftest import Tiny

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    tiny = Tiny(options.device)

    def many(kind, counts):
        @seed(options.seed)
        @settings(max_examples=options.lives // len(KINDS), deadline=None, database=None)
        @given(lives_of(kind, processes=True), st.booleans(), st.sampled_from(["all", "prompt"]))
        def run(actions, storage, policy):
            live(tiny, actions, storage, policy, counts, kind)

        run()
        print(kind, counts, flush=True)

    for kind in KINDS:
        many(kind, Counts())


if __name__ == "__main__":
    main(sys.argv[1:])
