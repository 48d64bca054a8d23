"""A trace of requests: which pages prompts asked for, wrote, published and gave back.

A recorded file has a line of JSON for each event behind a header. Pages have numbers, the same for
equal tokens behind equal tokens under one salt; neither tokens nor salts are in it. Files of
requests alone become such events too: Mooncake's, with hashes of blocks, and those with token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from topkv.errors import ReasonsError
from topkv.messages import shown
from topkv_prefixes.objects import HEADER
from topkv_prefixes.pages import page_keys

FORMAT, VERSION = "topkv requests", 2
BLOCK = 512
"""Tokens of a hash in the public traces of Mooncake."""

LONGEST_LINE = 1 << 26
"""Characters of the longest line: ids of several million tokens."""

MOST_REASONS = 8
"""Most reasons against one file that an error lists."""


class AskedError(ReasonsError):
    """A trace of requests cannot be read, or not be replayed in these sizes."""


class DOES(StrEnum):
    """Kinds of events, and the values of each. Pages are lists of numbers.

    FETCH: tokens, pages: a storage was asked for the pages of a prompt. BEGIN: slot, tokens of the
    prompt, its pages that may be found. LEASE: pages to spare, ``[slot, tokens]`` each: requests
    hold pages for N tokens. COPY: slot, place: a request has a page of its own there. FORK:
    slot, slot of another request, pages: the first holds the other's first pages. CUT: slot,
    place: pages from there on are written. SHRINK: slot, pages that are kept, 0 at the end.
    PUBLISH: slot, pages. FORGET: 1 if pages in a storage are forgotten too, else 0.
    """

    FETCH = "fetch"
    BEGIN = "begin"
    LEASE = "lease"
    COPY = "copy"
    FORK = "fork"
    CUT = "cut"
    SHRINK = "shrink"
    PUBLISH = "publish"
    FORGET = "forget"


@frozen(eq=False)
class Asked:
    """A trace of requests.

    Attributes:
        page_tokens: tokens of a page.
        page_bytes: bytes of a page in host memory.
        object_bytes: bytes of a page in a storage.
        slots: most requests that run at a time.
        longest: most tokens of the longest request.
        events: what happened, in order, see ``DOES``.
    """

    page_tokens: int
    page_bytes: int
    object_bytes: int
    slots: int
    longest: int
    events: Sequence[tuple[Any, ...]]

    def save(self, path: Path) -> None:
        """Write a file that ``load`` reads."""
        sizes = {name: getattr(self, name) for name in SIZES}
        header = {"format": FORMAT, "version": VERSION, **sizes}
        lines = [header | {"digest": _digest([header, *self.events])}, *self.events]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")

    @classmethod
    def load(cls, path: Path, setup: Setup) -> Asked:
        """Read a recorded trace, or a file of requests.

        Args:
            path: path of the file.
            setup: sizes that a file of requests does not state.

        Raises:
            AskedError: with the line and the mistake of each reason.
            OSError: the file cannot be read.
        """
        found, reasons = list[Any](), list[str]()
        try:
            for number, line in enumerate(_lines(path), 1):
                try:
                    found.append(json.loads(line))
                except ValueError as error:
                    reasons.append(f"line {number} is no JSON: {error}")
                except RecursionError:
                    reasons.append(f"line {number} is no JSON of a trace: it is nested too deeply")
        except UnicodeDecodeError as error:
            raise AskedError(f"{path} is no trace of requests", [f"no text: {error}"]) from error
        if not found and not reasons:
            reasons.append("it is empty")
        if not reasons:
            first = found[0]
            recorded = isinstance(first, dict) and first.get("format") == FORMAT
            reasons += _recorded_reasons(found) if recorded else _request_reasons(found, setup)
        if reasons:
            shown = [*reasons[:MOST_REASONS], f"and {len(reasons) - MOST_REASONS} more"]
            shown = shown if len(reasons) > MOST_REASONS else reasons
            raise AskedError(f"{path} is no trace of requests that can be replayed", shown)
        if recorded:
            events = [tuple(event) for event in found[1:]]
            return cls(**{name: first[name] for name in SIZES}, events=events)
        return of_requests(found, setup)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text, one after another: a device may have no end.

    Raises:
        UnicodeDecodeError: it is no text.
        AskedError: a line is longer than any of a trace.
    """
    with path.open(encoding="utf-8") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                reason = f"line {number} has more than {LONGEST_LINE} characters"
                raise AskedError(f"{path} is no trace of requests", [reason])
            yield line


SIZES = ("page_tokens", "page_bytes", "object_bytes", "slots", "longest")


@frozen
class Setup:
    """Sizes that a file of requests does not state.

    Attributes:
        page_tokens: tokens of a page; a block must be whole pages.
        token_bytes: bytes of a token's keys and values in host memory.
        requests: requests that run at a time. One ends when the one ``requests`` behind it begins.
    """

    page_tokens: int = BLOCK
    token_bytes: int = 128 << 10
    requests: int = 1


def of_requests(lines: Sequence[Mapping[str, Any]], setup: Setup) -> Asked:
    """Make events of requests that come one by one, each with its whole prompt.

    Their answers take pages, and are not found: the trace does not say what is in them.

    Args:
        lines: checked ones of a file.
        setup: see there.
    """
    page = setup.page_tokens
    numbers: dict[Any, int] = {}
    events: list[tuple[Any, ...]] = []
    longest, running = 1, min(setup.requests, len(lines))
    for index, line in enumerate(lines):
        slot = index % running
        if index >= running:
            events.append((DOES.SHRINK, slot, 0))
        prompt, pages = _pages_of(line, page, numbers)
        end = prompt + int(line.get("output_length", 0))
        longest = max(longest, end)
        # The last token of a prompt is computed, for its output.
        events.append((DOES.BEGIN, slot, prompt, pages[: (prompt - 1) // page]))
        events.append((DOES.LEASE, 0, [[slot, prompt]]))
        events.append((DOES.PUBLISH, slot, pages))
        if end > prompt:
            events.append((DOES.LEASE, 0, [[slot, end]]))
    size = page * setup.token_bytes
    return Asked(page, size, size + HEADER, running, longest, events)


def _pages_of(
    line: Mapping[str, Any], page: int, numbers: dict[Any, int]
) -> tuple[int, list[int]]:
    """Count the tokens of a prompt, and number its full pages."""
    names: list[Any]
    if "token_ids" in line:
        tokens = np.asarray(line["token_ids"], dtype=np.int64)
        names = list(page_keys(tokens, page, str(line.get("salt", "")).encode()))
        length = len(tokens)
    else:
        length, each = int(line["input_length"]), BLOCK // page
        names = [(block, part) for block in line["hash_ids"] for part in range(each)]
    return length, [numbers.setdefault(name, len(numbers)) for name in names[: length // page]]


def _digest(lines: Sequence[Any]) -> str:
    """Return a checksum of a header without one, and of the events behind it."""
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _recorded_reasons(lines: list[Any]) -> Iterator[str]:
    """Yield a reason against a recorded trace, which must be as it was written."""
    header = {name: value for name, value in lines[0].items() if name != "digest"}
    if header.get("version") != VERSION:
        found = shown(header.get("version"))
        yield f"it is of version {found}, expected {VERSION}: record it anew"
    elif lines[0].get("digest") != _digest([header, *lines[1:]]):
        yield "it is not as it was written: damaged, or changed by hand"


def _request_reasons(lines: list[Any], setup: Setup) -> Iterator[str]:
    """Yield reasons against a file of requests; none if it can be replayed."""
    hashed = [line for line in lines if isinstance(line, dict) and "token_ids" not in line]
    if hashed and BLOCK % setup.page_tokens:
        yield (
            f"a block of {BLOCK} tokens must be whole pages, got pages of {setup.page_tokens}; "
            "give --page-tokens that divide it"
        )
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict):
            yield f"line {number}: expected an object, got {shown(line)[:40]}"
        elif not _is_count(line.get("output_length", 0), 0):
            yield f"line {number}: output_length is {shown(line['output_length'])}"
        elif "token_ids" in line:
            if not line["token_ids"] or not _are_counts(line["token_ids"]):
                yield f"line {number}: token_ids must be some numbers from 0 on"
        else:
            length: Any = line.get("input_length")
            ids: Any = line.get("hash_ids")
            if not _is_count(length, 1) or not _are_counts(ids):
                yield (
                    f"line {number}: expected input_length and hash_ids, or token_ids, got "
                    f"{', '.join(map(str, line))[:60]}"
                )
            elif not length // BLOCK <= len(ids) <= -(-length // BLOCK):
                yield (
                    f"line {number}: {length} tokens are {-(-length // BLOCK)} blocks of {BLOCK}, "
                    f"got {len(ids)} hash_ids"
                )


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(each, 0) for each in value)


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < 2**63
