"""Parts of a cell that engines have in common: its process, and selections that drift."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from topkv.errors import OutOfMemory, TopkvError, is_out_of_memory
from topkv_bench.document import jsonable
from topkv_bench.drift import drifting
from topkv_bench.rows import NO_MEMORY, REFUSED, Row
from topkv_engines.session import Session


@contextmanager
def drifts(asked: dict[str, Any]) -> Iterator[list[Any]]:
    """Have selections drift from the moment in which a coordinator is made, which is before
    anything is captured."""
    with ExitStack() as stack:
        made, allocate = list[Any](), Session.allocate

        def drifted(session: Session, config: Any) -> None:
            allocate(session, config)
            queries = asked["queries"] or 1
            over = drifting(session.coordinator, asked["drift"], asked["context"], queries)
            made.append(stack.enter_context(over))

        if asked["drift"] is not None:
            Session.allocate = drifted  # type: ignore[method-assign]
            stack.callback(setattr, Session, "allocate", allocate)
        yield made


def write(row_of: Callable[[dict[str, Any]], Row]) -> None:
    """Run the cell that the first argument of the process asks for, and write its row to the file
    that the second one names. A cell that is refused, or out of memory, is such a row."""
    row = _row(row_of, json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(row, default=jsonable), encoding="utf-8")


def _row(row_of: Callable[[dict[str, Any]], Row], asked: dict[str, Any]) -> Row:
    try:
        return row_of(asked)
    except TopkvError as error:
        status = NO_MEMORY if isinstance(error, OutOfMemory) else REFUSED
        return {"status": status, "reason": " ".join(str(error).split())}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"status": NO_MEMORY, "reason": str(error).partition("\n")[0]}
