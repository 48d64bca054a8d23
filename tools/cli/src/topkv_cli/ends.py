"""End of a command that fails: one message on stderr and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from topkv.errors import TopkvError

REFUSED, UNEXPECTED = 2, 1
TRACEBACK = "TOPKV_TRACEBACK"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextmanager
def reported() -> Iterator[None]:
    """Turn errors into one message on stderr and an exit status; a traceback only if asked for.

    Status 2: topkv or the system refuses (``OSError``: a full disk, a directory that cannot be
    written). Status 1: everything else, which nobody expected. A reader that has closed the
    pipe is no error: click ends the command without a word, with status 1.
    """
    if sys.stdout is None:
        click.echo("error: stdout is closed; send it to /dev/null if you do not want it", err=True)
        sys.exit(REFUSED)
    try:
        yield
    except click.ClickException:
        raise
    except Exception as error:
        _let_go_of_full_stdout()
        if os.environ.get(TRACEBACK):
            raise
        known = isinstance(error, (TopkvError, OSError))
        text = str(error) if known else f"unexpected {type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            text = f"the output cannot be written: {text}"
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        hint = "" if known else f"\n  set {TRACEBACK}=1 to see where"
        click.echo(f"error: {text}{notes}{hint}", err=True)
        sys.exit(REFUSED if known else UNEXPECTED)


def _let_go_of_full_stdout() -> None:
    """Drop a full stdout, or Python writes the rest once more at exit and changes the status."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
