"""Documents of the mixture: contexts with things hidden in them, questions, and the answers.

Each maker gets a generator of random numbers and the room in bytes, and returns pieces of text, of
which some are answers. Templates are those of the tasks of ``topkv eval``; their contents are
drawn anew, and there are more questions about a context than a task asks.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

from topkv_evaluation.retrieval import ASK, FACT, standard_library_text
from topkv_evaluation.tasks import (
    common_words,
    frequent_words,
    near_keys,
    needles,
    tracking,
    walk,
)
from topkv_evaluation.tasks.words import compounds, single_words

Piece = tuple[str, bool]
"""Text, and True if it is an answer."""

Maker = Callable[[random.Random, int], list[Piece]]


@lru_cache(maxsize=1)
def code() -> str:
    """Return the sources that the checkpoints are trained on."""
    return standard_library_text("train").tobytes().decode("ascii")


@lru_cache(maxsize=1)
def prose() -> tuple[str, ...]:
    """Return sentences of Python's help texts: English in which no task hides its needles."""
    from pydoc_data.topics import topics

    text = " ".join(topics[name] for name in sorted(topics))
    text = text.encode("ascii", "ignore").decode()
    return tuple(" ".join(line.split()) + "." for line in text.split(".") if len(line) > 20)


def filler(rng: random.Random, room: int) -> str:
    """Draw ``room`` characters of source code."""
    start = rng.randrange(len(code()) - room + 1)
    return code()[start : start + room]


def size(pieces: Sequence[Piece]) -> int:
    return sum(len(text) for text, _ in pieces)


def facts(rng: random.Random, room: int, every: int = 160) -> list[Piece]:
    """Make source code with facts and, behind each, its question: one for ``every`` bytes."""
    count = max(1, room // max(every, 56))
    keys = walk.places(count, rng)
    values = [str(rng.randint(10000, 99999)) for _ in keys]
    order = [i for i in range(count) for _ in range(2)]
    rng.shuffle(order)
    statements: list[list[Piece]] = []
    seen: set[int] = set()
    for i in order:
        if i in seen:
            statements.append(
                [(ASK.format(key=keys[i]), False), (values[i], True), (".\n", False)]
            )
        else:
            statements.append([(FACT.format(key=keys[i], value=values[i]), False)])
        seen.add(i)
    spare = room - sum(map(size, statements))
    cuts = sorted(rng.randint(0, spare) for _ in statements)
    text, pieces, last = filler(rng, spare), list[Piece](), 0
    for cut, statement in zip(cuts, statements, strict=True):
        pieces += [(text[last:cut], False), *statement]
        last = cut
    return [*pieces, (text[last:], False)]


def dense_facts(rng: random.Random, room: int) -> list[Piece]:
    """Make nothing but facts and questions."""
    return facts(rng, room, 56)


def lookup(rng: random.Random, room: int) -> list[Piece]:
    """Make pairs of keys and values, then all the keys again in another order.

    Keys of one letter are learned first, and longer ones from there. Values are not as short:
    all but their first letter follow from the one before, which is learned before the rest.
    """
    lengths = rng.choice((1, 2, 4)), rng.choice((2, 4, 5))
    most = 26 if lengths[0] == 1 else 300
    count = min(most, max(2, room // (2 * sum(lengths) + 4)))
    keys, values = (_names(rng, count, length, string.ascii_lowercase) for length in lengths)
    pairs = [*zip(keys, values, strict=True)]
    head = "\n" + "".join(f"{key}={value}\n" for key, value in pairs)
    rng.shuffle(pairs)
    pieces = [(head, False)]
    for key, value in pairs:
        pieces += [(f"{key}=", False), (value, True), ("\n", False)]
    return pieces


def chains(rng: random.Random, room: int) -> list[Piece]:
    """Make variables that hold other ones, without noise, and a short question for each value."""
    letters, digits = rng.choice((1, 2, 3, 5)), rng.choice((2, 5))
    left = _names(rng, min({1: 26, 2: 300}.get(letters, room), 10 + room // 6), letters)
    lines, asked, used = list[list[str]](), list[list[Piece]](), 0
    for value in rng.sample(range(10 ** (digits - 1), 10**digits), min(90, 2 + room // 24)):
        hops = rng.randint(1, 4 if room > 150 else 1)
        names, left = left[: hops + 1], left[hops + 1 :]
        if len(names) <= hops:
            break
        own = [f"VAR {names[0]} = {value}\n"]
        own += [f"VAR {new} = VAR {old} \n" for old, new in pairwise(names)]
        question = [(f"\nThe value {value}: ", False), (" ".join(names), True)]
        used += sum(map(len, own)) + size(question)
        if lines and used > room:
            break
        lines.append(own)
        asked.append(question)
    rng.shuffle(asked)
    return [(merged(rng, lines), False), *(piece for question in asked for piece in question)]


def merged(rng: random.Random, lines: Sequence[Sequence[str]]) -> str:
    """Merge lines of several chains, each in its order."""
    order = [i for i, own in enumerate(lines) for _ in own]
    rng.shuffle(order)
    taken = [iter(own) for own in lines]
    return "".join(next(taken[i]) for i in order)


def tracked(rng: random.Random, room: int) -> list[Piece]:
    """Make RULER's variable tracking: worked example if there is room, chains, questions."""
    pieces: list[Piece] = []
    if room >= 1800:
        pieces = [*_tracked(rng, 850, 3, 4, 1), ("\n\n", False)]
    many = 1 if room < 1200 else rng.choice((1, 1, 2, 3))
    return [*pieces, *_tracked(rng, room - size(pieces), 5, 4, many)]


def _names(
    rng: random.Random, count: int, letters: int, alphabet: str = string.ascii_uppercase
) -> list[str]:
    """Draw names that all differ."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(alphabet, k=letters))] = None
    return [*found]


def _tracked(rng: random.Random, room: int, letters: int, hops: int, many: int) -> list[Piece]:
    names = _names(rng, many * (hops + 1), letters)
    values = rng.sample(range(10000, 100000), many)
    chained, tail = [], list[Piece]()
    for i, value in enumerate(values):
        own = names[i * (hops + 1) : (i + 1) * (hops + 1)]
        lines = [f"VAR {own[0]} = {value}"]
        lines += [f"VAR {new} = VAR {old} " for old, new in pairwise(own)]
        chained.append(lines)
        said = {"query": value, "count": hops + 1}
        tail += [(tracking.QUESTION.format(**said) + tracking.PREFIX.format(**said), False),
                 (" ".join(own), True)]  # fmt: skip
    order = merged(rng, [[f"{line}\n" for line in lines] for lines in chained]).splitlines()
    header = tracking.CONTEXT.format(context="")
    spare = room - len(header) - size(tail) - sum(len(line) + 1 for line in order)
    lines = [needles.NOISE] * max(0, spare // (len(needles.NOISE) + 1))
    for gone, place in enumerate(sorted(rng.choices(range(len(lines) + 1), k=len(order)))):
        lines.insert(place + gone, order[gone])
    context = "\n".join(lines).replace(". \n", ".\n")
    return [(header + context, False), *tail]


def hidden(rng: random.Random, room: int) -> list[Piece]:
    """Make RULER's needles: kinds of key and value, numbers of each, and haystack are drawn."""
    kind = rng.choice(("numbers", "numbers", "uuids"))
    key = rng.choice(("words", "words", "uuids")) if room >= 1500 else "words"
    values = rng.choice((1, 1, 2, 4)) if room >= 1000 else rng.choice((1, 1, 2))
    queries = 1 if values > 1 else rng.choice((1, 1, 4)) if room >= 1500 else 1
    hay = rng.choice(("noise", "text", "text", "needles", "needles"))
    return _needles(rng, room, hay, (key, kind), values, queries)


def near(rng: random.Random, room: int) -> list[Piece]:
    """Make needles whose keys differ in a letter."""
    return _needles(rng, room, "near", ("letters", "numbers"), 1, 1)


def _needles(
    rng: random.Random, room: int, hay: str, kinds: tuple[str, str], values: int, queries: int
) -> list[Piece]:
    kind = kinds[1]
    asks = max(1, room // 1024 if queries == 1 else 1)
    count = max(asks, queries) + rng.randint(0, 2 if room >= 800 else 1)
    if hay == "near":
        asked = "".join(rng.choices(string.ascii_lowercase, k=near_keys.LETTERS))
        keys = [asked, *near_keys.near(asked, max(count, room // 70), rng)]
    else:
        keys = [*dict.fromkeys(_drawn(kinds[0], rng) for _ in range(count))]
    held = {name: [_drawn(kind, rng) for _ in range(values)] for name in keys}
    one = values * queries == 1
    texts = (needles.CONTEXT, needles.QUESTION, needles.PREFIX)
    before, question, prefix = needles.in_singular(texts) if one else texts
    said = kind.removesuffix("s") if one else kind
    context = list[str]()
    stated = [(name, value) for name in keys for value in held[name]]
    rng.shuffle(stated)
    order = {name: [value for each, value in stated if each == name] for name in keys}
    tail = list[Piece]()
    chosen = rng.sample(keys, min(asks * queries, len(keys)))
    for first in range(0, len(chosen), queries):
        names = chosen[first : first + queries]
        query = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]
        asked_for = {"kind": said, "query": query}
        answer = ", ".join(value for name in names for value in order[name])
        tail += [((question + prefix).format(**asked_for) + " ", False), (answer, True),
                 (".", False)]  # fmt: skip
    header = before.format(kind=said, context="")
    facts = [needles.NEEDLE.format(kind=kind, key=name, value=value) for name, value in stated]
    spare = room - len(header) - size(tail) - sum(len(fact) + 1 for fact in facts)
    while hay == "near" and spare < 0 and len(facts) > 1:
        spare += len(facts.pop(_other(facts, chosen))) + 1
    context = _pieces(rng, hay, spare, kinds)
    places = sorted(rng.choices(range(len(context) + 1), k=len(facts)))
    for gone, place in enumerate(places):
        context.insert(place + gone, facts[gone])
    joined = (" " if hay == "text" else "\n").join(context)
    return [(header + joined, False), *tail]


def _other(facts: Sequence[str], chosen: Sequence[str]) -> int:
    """Return the number of the first statement that is not asked for."""
    return next(
        i for i, fact in enumerate(facts) if not any(f" {name} is" in fact for name in chosen)
    )


def _drawn(kind: str, rng: random.Random) -> str:
    if kind == "words":
        return rng.choice(compounds())
    return needles.drawn(kind, rng)


def _pieces(rng: random.Random, hay: str, spare: int, kinds: tuple[str, str]) -> list[str]:
    """Make a haystack of up to ``spare`` bytes."""
    found = list[str]()
    start = rng.randrange(len(prose()))
    while hay != "near":
        if hay == "noise":
            piece = needles.NOISE
        elif hay == "text":
            piece = prose()[(start + len(found)) % len(prose())][:200]
        else:
            key, value = (_drawn(kind, rng) for kind in kinds)
            piece = needles.NEEDLE.format(kind=kinds[1], key=key, value=value)
        spare -= len(piece) + 1
        if spare < 0:
            break
        found.append(piece)
    return found


def walked(rng: random.Random, room: int) -> list[Piece]:
    """Make walks through one ring of places, from several places."""
    asks = max(1, room // 1500)
    tail, room = list[tuple[int, int]](), room - len(walk.CONTEXT)
    line = len(walk.LINE.format(place="aaaa", after="aaaa")) + 1
    asked = 140 + 6 * 32
    steps = 32 if room > 1500 else 16 if room > 700 else 4 if room > 300 else 2
    asked -= 6 * (32 - steps)
    size_of_ring = max(3, (room - asks * asked) // line)
    ring = walk.places(size_of_ring, rng)
    lines = [
        walk.LINE.format(place=place, after=after)
        for place, after in zip(ring, [*ring[1:], ring[0]], strict=True)
    ]
    rng.shuffle(lines)
    tail = [(rng.randrange(size_of_ring), min(steps, size_of_ring - 1)) for _ in range(asks)]
    pieces = [(walk.CONTEXT.format(context="\n".join(lines)), False)]
    for start, count in tail:
        said = {"start": ring[start], "steps": count}
        answer = ", ".join((ring * 2)[start + 1 : start + 1 + count])
        pieces += [((walk.QUESTION + walk.PREFIX).format(**said) + " ", False), (answer, True),
                   (".", False)]  # fmt: skip
    return pieces


def counted(rng: random.Random, room: int) -> list[Piece]:
    """Make RULER's common words (without its worked example) and frequent words."""
    if rng.random() < 0.5:
        length = max(1, (room - 400) // 60)
        coded = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(length + 3)]
        text = [word for i, word in enumerate(coded) for _ in range(max(1, 2 * length // (i + 2)))]
        text = text[: max(3, (room - 360) // 7)]
        answer = ", ".join(coded[:3])
        parts = (frequent_words.CONTEXT, frequent_words.QUESTION + frequent_words.PREFIX)
        rng.shuffle(text)
        return [(parts[0].format(context=" ".join(text)) + parts[1] + " ", False), (answer, True)]
    words = rng.sample(single_words(), max(12, (room - 500) // 14))
    often = [*words[:10]] * 6 + words[10 : max(11, (room - 1100) // 14)]
    rng.shuffle(often)
    head = common_words.CONTEXT.format(context=common_words.numbered(often))
    answer = common_words.numbered([word for word in dict.fromkeys(often) if word in words[:10]])
    tail = common_words.QUESTION + common_words.PREFIX + " "
    return [(head + tail, False), (answer, True)]


def plain(rng: random.Random, room: int) -> list[Piece]:
    """Make source code or prose."""
    if rng.random() < 0.5:
        return [(filler(rng, room), False)]
    return [(" ".join(_pieces(rng, "text", room, ("words", "words"))), False)]


MAKERS: dict[str, Maker] = {
    "lookup": lookup, "dense_facts": dense_facts, "facts": facts, "chains": chains,
    "vt": tracked, "needles": hidden, "near_keys": near, "walk": walked, "counted": counted,
    "plain": plain,
}  # fmt: skip
"""Makers by the names of a stage's weights."""


def document(kind: str, seed: str, length: int) -> tuple[bytes, bytes]:
    """Make a document of exactly ``length`` bytes, and a mark for each byte of an answer.

    Room that a maker leaves is source code in front; a text that is too long is cut off there.
    """
    rng = random.Random(seed)
    pieces = MAKERS[kind](rng, length)
    parts = [(part.encode(), answer) for part, answer in pieces]
    text = b"".join(part for part, _ in parts)
    marks = b"".join((b"\1" if answer else b"\0") * len(part) for part, answer in parts)
    spare = length - len(text)
    if spare > 0:
        front = filler(rng, spare).encode("ascii")
        return front + text, bytes(spare) + marks
    return text[-length:], marks[-length:]
