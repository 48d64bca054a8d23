"""Headers and bodies of files as the commands read them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from topkv_files import owned
from topkv_files.folder import Held
from topkv_prefixes.objects import HEADER, fingerprint_in, problem_of

FOREIGN = "it is not of this user and topkv, and stays"


def parts_of(held: Held) -> Iterator[np.ndarray]:
    """Header and body of a file."""
    with open(owned.open_file(held.path), "rb") as file:
        whole = np.frombuffer(file.read(), dtype=np.uint8)
    yield whole[:HEADER]
    yield whole[HEADER:]


def fingerprint_of(held: Held) -> str:
    """Fingerprint of the model and configuration in a file's header, or why it has none."""
    try:
        if not owned.is_page(held.path):
            return "foreign"
        with open(owned.open_file(held.path), "rb") as file:
            header = np.frombuffer(file.read(HEADER), dtype=np.uint8)
    except FileNotFoundError:  # removed meanwhile
        return "gone"
    except PermissionError:
        return "foreign"
    return fingerprint_in(header).hex() if len(header) == HEADER else "damaged"


def problem_in(held: Held) -> str | None:
    """Return why a file is no page; None where it is one, or is gone."""
    try:
        if not owned.is_page(held.path):
            return FOREIGN
        header, body = parts_of(held)
    except FileNotFoundError:
        return None
    except PermissionError:
        return FOREIGN
    return problem_of(header, [body], held.key, None)
