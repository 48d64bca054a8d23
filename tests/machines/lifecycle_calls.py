"""Rules of the lifecycle machine for the calls that an engine makes between forwards."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.machines.lifecycle_checks import Checks
from topkv.errors import DeviceMemoryError, HostMemoryError, RequestError
from topkv_testing.machines.lifecycle_model import MOST_TOKENS, REQUESTS
from topkv_testing.models.cache_model import ceil_div


def any_live(machine: Any) -> bool:
    """Return True if there is a request."""
    return bool(machine.live)


class Calls(Checks):
    """Begin, end, reserve, roll back, truncate and fork; a refused call changes nothing."""

    def slot(self, data: st.DataObject, least: int = 0) -> int:
        """Draw a request of at least ``least`` tokens."""
        fitting = [slot for slot, request in self.live.items() if request.length >= least]
        return data.draw(st.sampled_from(sorted(fitting or self.live)))

    def roll_back(self, slot: int, back: int) -> None:
        request = self.live[slot]
        length = max(0, request.length - back)
        if not request.can_roll_back(length):
            call = self.coordinator.rollback
            self.refused(RequestError, call, slot, length, match="behind the ring")
            return
        self.coordinator.rollback(slot, length)
        request.cut(length)
        request.dirty = True

    def reject(self, left: dict[int, int]) -> None:
        """Take back what was rejected of several requests at once; ``left`` has their lengths."""
        slots, lengths = [*left], [*left.values()]
        if not all(self.live[slot].can_roll_back(length) for slot, length in left.items()):
            call = self.coordinator.rollback
            self.refused(RequestError, call, slots, lengths, match="behind the ring")
            return
        self.coordinator.rollback(slots, lengths)
        for slot, length in left.items():
            self.live[slot].cut(length)
            self.live[slot].dirty = True

    def fork_request(self, slot: int) -> int | None:
        """Fork a request; return the twin, or None where there is no room for it."""
        request = self.live[slot]
        for room, error in (
            (len(self.live) < REQUESTS, DeviceMemoryError),
            (self.pages.can_fork(request.length), HostMemoryError),
        ):
            if not room:
                self.refused(error, self.coordinator.fork, slot)
                return None
        twin = self.coordinator.fork(slot)
        assert twin not in self.live, "a slot was given away twice"
        request.flushed()
        self.live[twin] = request.twin()
        self.used.add(twin)
        self.pages.fork(slot, twin, request.length)
        return twin

    @rule()
    def begin(self) -> None:
        if len(self.live) == REQUESTS:
            call = self.coordinator.request_begin
            self.refused(DeviceMemoryError, call, match="request slots are taken")
        else:
            self.begin_request()

    @precondition(any_live)
    @rule(data=st.data())
    def refusals(self, data: st.DataObject) -> None:
        """Make calls that may be refused: a refused call changes nothing."""
        self.reserve_for(self.slot(data), data.draw(st.integers(0, MOST_TOKENS)))
        self.admit(data.draw(st.integers(0, MOST_TOKENS + 1)), data.draw(st.integers(1, REQUESTS)))
        self.meddle(self.slot(data))

    def admit(self, tokens: int, count: int) -> None:
        """``can_admit`` agrees with the room that there is, with a reason for each shortage."""
        answer = self.coordinator.can_admit(tokens, count)
        short = [
            count > REQUESTS - len(self.live),
            tokens > MOST_TOKENS,
            count * ceil_div(tokens, self.pages.page_tokens) > self.pages.free,
        ]
        assert len(answer.reasons) == sum(short)
        assert bool(answer) is not any(short)
        begun = [self.begin_request() for _ in range(count)] if answer else []
        for slot in begun:
            self.reserve_for(slot, tokens)
        self.check_counts()
        for slot in begun:
            self.coordinator.request_end(slot)
            self.forget(slot)

    def reserve_for(self, slot: int, tokens: int) -> None:
        call = self.coordinator.reserve
        if self.pages.reserve([(slot, self.live[slot].length + tokens)]):
            call(slot, tokens)
        else:
            self.refused(HostMemoryError, call, slot, tokens)

    @precondition(any_live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = self.slot(data)
        self.coordinator.request_end(slot)
        self.forget(slot)
        self.refused(RequestError, self.coordinator.request_end, slot, match="holds no request")

    @precondition(any_live)
    @rule(data=st.data(), back=st.integers(0, 9))
    def rollback(self, data: st.DataObject, back: int) -> None:
        self.roll_back(self.slot(data), back)

    @precondition(any_live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = self.slot(data)
        request = self.live[slot]
        length = data.draw(st.integers(0, request.length))
        self.coordinator.truncate(slot, length)
        request.cut(length)
        request.dirty = False
        request.restored()
        self.pages.cut(slot, length)

    def meddle(self, slot: int) -> None:
        """Make calls that an open forward refuses: they change nothing."""
        coordinator = self.coordinator
        self.refused(RequestError, coordinator.forward_end, match="without forward_begin")
        self.refused(RequestError, coordinator.forward_begin, [slot, slot], match="twice")
        self.refused(RequestError, coordinator.truncate, slot, self.live[slot].length + 1)
        coordinator.forward_begin([-1])
        for call, *args in (
            (coordinator.forward_begin, [slot]),
            (coordinator.reserve, slot, 1),
            (coordinator.rollback, slot, 0),
            (coordinator.truncate, slot, 0),
            (coordinator.fork, slot),
        ):
            self.refused(RequestError, call, *args, match="during a forward")
        coordinator.forward_abort()
