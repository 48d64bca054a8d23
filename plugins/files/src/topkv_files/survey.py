"""What the commands read of a file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from topkv.storage.objects import HEADER, fingerprint_in, problem_of
from topkv_files.folder import Held


def parts_of(held: Held) -> Iterator[np.ndarray]:
    """Header and body of a file."""
    whole = np.fromfile(held.path, dtype=np.uint8)
    yield whole[:HEADER]
    yield whole[HEADER:]


def fingerprint_of(held: Held) -> str:
    """Of what model and configuration a file says it is."""
    try:
        with open(held.path, "rb") as file:
            header = np.frombuffer(file.read(HEADER), dtype=np.uint8)
    except FileNotFoundError:  # removed meanwhile
        return "gone"
    return fingerprint_in(header).hex() if len(header) == HEADER else "damaged"


def problem_in(held: Held) -> str | None:
    """Why a file is no page; None where it is one, or is gone."""
    try:
        header, body = parts_of(held)
    except FileNotFoundError:
        return None
    return problem_of(header, [body], held.key, None)
