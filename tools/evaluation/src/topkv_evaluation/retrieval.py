"""Long real text with planted facts, and the question whose answer only a distant fact gives.

The text is source code of Python's standard library, one token a byte: by default the part of
3.11.7's that the checkpoints were not trained on, pinned as package data. Planted statements::

    \\n# fact: key qzkv is 48213.\\n          a fact
    \\n# ask: key qzkv is                     a question; the five digits are its answer

Keys are distinct within a document and values are random, so a model can answer only by attending
to the fact itself: a selection that leaves it out answers wrong. Needs numpy and nothing else.
"""

from __future__ import annotations

import lzma
import os
import sysconfig
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

KEY_LETTERS = 4
VALUE_DIGITS = 5
FACT = "\n# fact: key {key} is {value}.\n"
ASK = "\n# ask: key {key} is "
KEY_OFFSET = {"fact": FACT.index("{"), "ask": ASK.index("{")}
VALUE_OFFSET = {
    "fact": len(FACT.split("{value}")[0].format(key="k" * KEY_LETTERS)),
    "ask": len(ASK.format(key="k" * KEY_LETTERS)),
}
FACT_BYTES = len(FACT.format(key="k" * KEY_LETTERS, value="0" * VALUE_DIGITS))
ASK_BYTES = len(ASK.format(key="k" * KEY_LETTERS))

Part = Literal["train", "held_out", "all"]

# Packages that some distributions of Python leave out or keep apart, so that one version of Python
# gives one text everywhere; and tables of characters, which are no prose.
_SKIPPED_DIRS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings"}
_SKIPPED_DIRS |= {"idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
_HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Fact:
    """A planted fact.

    Attributes:
        key: four lowercase letters.
        value: five digits, the first not 0.
        position: index of the statement's first token (the line feed before it).
    """

    key: str
    value: str
    position: int

    @property
    def value_position(self) -> int:
        """Index of the first digit of the value."""
        return self.position + VALUE_OFFSET["fact"]


@dataclass(frozen=True, eq=False)
class Document:
    """A prompt that ends in a question.

    Attributes:
        tokens: [n] uint8, the whole prompt; ``text`` is the same as a string.
        facts: the planted facts in order of position.
        asked: the fact that the question at the end asks for.
    """

    tokens: np.ndarray
    facts: tuple[Fact, ...]
    asked: Fact

    @property
    def text(self) -> str:
        return self.tokens.tobytes().decode("ascii")

    @property
    def expected(self) -> str:
        """The right answer: five digits."""
        return self.asked.value

    @property
    def distance(self) -> int:
        """Tokens from the first digit of the asked value to the first token of the answer."""
        return len(self.tokens) - self.asked.value_position


def _source_names(root: Path) -> list[str]:
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_DIRS]
        for file in files:
            if file.endswith(".py") and not file.startswith(_SKIPPED_FILES):
                names.append(Path(folder, file).relative_to(root).as_posix())
    return sorted(names)


def _in_part(name: str, part: Part) -> bool:
    held_out = zlib.crc32(name.encode()) % _HELD_OUT_ONE_IN == 0
    return part == "all" or held_out == (part == "held_out")


@lru_cache(maxsize=3)
def standard_library_text(part: Part = "all") -> np.ndarray:
    """Return sources of Python's standard library, ASCII files alone, in order of their path.

    The text is the same for every installation of one version of Python. About one file in
    sixteen, chosen by the checksum of its path, is held out from training.

    Args:
        part: "train", "held_out" or "all".

    Returns:
        [n] uint8, read-only; 7 MB for "all".

    Raises:
        ValueError: ``part`` is none of the three.
        FileNotFoundError: this Python comes without the sources of its standard library.
    """
    if part not in ("train", "held_out", "all"):
        raise ValueError(f"part is 'train', 'held_out' or 'all', got {part!r}")
    root = Path(sysconfig.get_paths()["stdlib"])
    blobs = [(root / name).read_bytes() for name in _source_names(root) if _in_part(name, part)]
    text = b"".join(blob for blob in blobs if blob.isascii()).replace(b"\r\n", b"\n")
    if not text:
        raise FileNotFoundError(
            f"no Python sources of the standard library under {root}; install a Python that"
            " brings them as .py files, or pass a text of your own"
        )
    return np.frombuffer(text, dtype=np.uint8)


@lru_cache(maxsize=1)
def pinned_text() -> np.ndarray:
    """Return the held-out part of the standard library of Python 3.11.7, the same everywhere.

    Returns:
        [n] uint8, read-only; 490 kB of ASCII.
    """
    text = lzma.decompress((Path(__file__).parent / "text" / "held_out.txt.xz").read_bytes())
    return np.frombuffer(text, dtype=np.uint8)


def ask(key: str) -> str:
    """Return the question for ``key``, to append to a prompt; the next five tokens answer it."""
    return ASK.format(key=key)


def random_facts(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Draw ``count`` pairs (key, value) with keys that all differ."""
    numbers = rng.choice(26**KEY_LETTERS, size=count, replace=False)
    values = rng.integers(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS, size=count)
    letters = (numbers[:, None] // 26 ** np.arange(KEY_LETTERS)) % 26 + ord("a")
    keys = ["".join(map(chr, row)) for row in letters]
    return [(key, str(value)) for key, value in zip(keys, values, strict=True)]


def make_prompt(
    tokens: int,
    facts: int = 20,
    seed: int = 0,
    *,
    depth: float | None = None,
    sinks: int = 256,
    recent: int | None = None,
    text: np.ndarray | None = None,
) -> Document:
    """Make a prompt of exactly ``tokens`` tokens: text, facts between its lines, then a question.

    Where the lines are too few for the facts, these are anywhere. No fact is in the first
    ``sinks`` or the last ``recent`` tokens, so neither attention sinks nor a recent window hold
    an answer. The same arguments give the same prompt.

    Args:
        tokens: length of the prompt, question included; one token is one byte.
        facts: planted facts, at least 1.
        seed: of the text's start, the keys, the values, the places and the question.
        depth: which fact is asked, as a share of the zone of facts: 0 the first, 1 the last.
            None: a random one.
        sinks: tokens at the start that stay free of facts.
        recent: tokens at the end that stay free of facts; a third of the prompt if None.
        text: [n] uint8 ASCII, n >= tokens; ``pinned_text`` if None.

    Raises:
        ValueError: the facts do not fit, or a number is out of its range.
    """
    recent = max(tokens // 3, ASK_BYTES) if recent is None else recent
    _check(tokens, facts, depth, sinks, recent)
    rng = np.random.default_rng(seed)
    body = _text_window(rng, tokens - facts * FACT_BYTES - ASK_BYTES, text)
    room = tokens - recent - facts * FACT_BYTES
    starts = np.flatnonzero(body[:room] == ord("\n")) + 1
    starts = starts[(starts >= sinks) & (starts <= room)]
    if len(starts) >= facts:
        places = np.sort(rng.choice(starts, size=facts, replace=False))
    else:  # a short prompt or long lines: anywhere in the zone
        places = np.sort(rng.integers(sinks, room + 1, size=facts))
    planted = tuple(
        Fact(key, value, int(place) + i * FACT_BYTES)
        for i, ((key, value), place) in enumerate(
            zip(random_facts(rng, facts), places, strict=True)
        )
    )
    pick = int(rng.integers(facts)) if depth is None else round(depth * (facts - 1))
    pieces = np.split(body, places)
    blob = pieces[0].tobytes()
    for fact, piece in zip(planted, pieces[1:], strict=True):
        blob += FACT.format(key=fact.key, value=fact.value).encode() + piece.tobytes()
    blob += ask(planted[pick].key).encode()
    return Document(np.frombuffer(blob, dtype=np.uint8), planted, planted[pick])


def _check(tokens: int, facts: int, depth: float | None, sinks: int, recent: int) -> None:
    if facts < 1:
        raise ValueError(f"a prompt needs at least 1 fact, got {facts}")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth is a share between 0 and 1, got {depth}")
    if sinks < 0 or recent < ASK_BYTES:
        raise ValueError(
            f"sinks must be at least 0 and recent at least {ASK_BYTES} (the question is in it),"
            f" got {sinks} and {recent}"
        )
    least = sinks + recent + facts * FACT_BYTES
    if tokens < least:
        raise ValueError(
            f"{tokens} tokens cannot hold {facts} facts of {FACT_BYTES} between {sinks} sinks and"
            f" the {recent} recent tokens: at least {least}; plant fewer or lower sinks or recent"
        )


def _text_window(rng: np.random.Generator, length: int, text: np.ndarray | None) -> np.ndarray:
    text = pinned_text() if text is None else text
    if len(text) < length:
        raise ValueError(
            f"the prompt needs {length} tokens of text and the text has {len(text)};"
            " pass a longer text, such as standard_library_text('all')"
        )
    if text.max(initial=0) > 127:
        raise ValueError("the text must be ASCII (uint8 below 128): one token is one byte")
    start = int(rng.integers(len(text) - length + 1))
    return text[start : start + length]


def exact_match(answer: str, expected: str) -> bool:
    """Return True if ``answer`` begins with the expected digits; any text may follow."""
    return answer[: len(expected)] == expected
