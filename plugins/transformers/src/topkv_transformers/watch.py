"""All that keys and values of a model follow from beside its tokens, written down once.

Pages in host memory, pages in a storage, suspended sessions and recorded steps hold for one state
of a model: its modules, their parameters, buffers and other tensors, flags, texts and lists, and
with these its adapters. ``ModelWatch.look`` returns that state, the same object as long as nothing
of it has changed; ``walk.py`` says what is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from attrs import define, field
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from topkv_transformers.contents import contents_of
from topkv_transformers.hooks import changes_inputs
from topkv_transformers.walk import Walk


@define(eq=False)
class ModelState:
    """One state of a model; states are compared by identity.

    Attributes:
        walk: what was read of it.
        unsure: every reason why keys may depend on more than this state; empty if they do not.
        digest: see ``ModelWatch.digest``; empty until somebody has asked for it.
    """

    walk: Walk
    unsure: list[str]
    digest: str = ""
    _held: list[StorageWeakRef] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        # No later tensor can have the place of one of these, by which they are compared.
        self._held = [StorageWeakRef(each.untyped_storage()) for each in self.walk.alive()]


class ModelWatch:
    """Watches the modules that make keys and values.

    Reads no weights, and waits for no device, but in ``digest``. A write that torch does not count
    is not seen: one through ``parameter.data``, NumPy, or a kernel of somebody's own. ``renew``
    says that there was one.

    Args:
        model: the attached model.
        decoder: the part of it that runs the layers.

    Attributes:
        state: the state at the last look; None before the first.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self.model, self.decoder = model, decoder
        self.state: ModelState | None = None
        self._trusted = False
        self._contents: dict[tuple[Any, ...], str] = {}

    def look(self) -> ModelState:
        """The state of now."""
        walk, before = Walk(self.decoder), self.state
        unsure = [*walk.unwatched, *changes_inputs(self.model, self.decoder)]
        if walk.hooked:
            unsure.append("a hook or a replaced forward stands inside of the model")
        if before is not None and before.unsure == unsure and before.walk == walk:
            return before
        self.state = ModelState(walk, unsure)
        # While the state before stood, nothing else could have a place of its tensors.
        self._contents = {p: self._contents[p] for p in walk.places if p in self._contents}
        return self.state

    def current(self) -> ModelState:
        """The state of now, without a look inside ``unchanged``."""
        return self.state if self._trusted and self.state else self.look()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Look once now, and not again inside, nor in calls of this within: nothing there changes
        the model."""
        self.current()
        before, self._trusted = self._trusted, True
        try:
            yield
        finally:
            self._trusted = before

    def renew(self) -> None:
        """Let the next look return a new state, whatever it sees."""
        self.state = None
        self._contents.clear()

    def digest(self) -> str:
        """A hash of the state at the last look, equal in every process.

        It reads every byte of all tensors whose contents are not known yet, and waits for the
        device. Tensors that stay as they were are not read again.
        """
        state = self.state or self.look()
        if not state.digest:
            places = state.walk.places
            tensors = zip(places, state.walk.alive(), strict=True)
            missing = {place: tensor for place, tensor in tensors if place not in self._contents}
            found = contents_of(list(missing.values()))
            self._contents |= dict(zip(missing, found, strict=True))
            digest = blake2b(digest_size=16)
            digest.update(repr(state.walk.stable).encode())
            digest.update(repr([self._contents[each] for each in places]).encode())
            state.digest = digest.hexdigest()
        return state.digest
