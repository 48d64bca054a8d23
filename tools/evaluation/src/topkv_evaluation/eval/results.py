"""File ``results.jsonl``: a line for each cell when it is done, so that a run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topkv.errors import ConfigError

RESULTS = "results.jsonl"
NEEDED = frozenset(("key", "data", "model", "task", "question", "algorithm", "plugin"))

Row = dict[str, Any]


def read_rows(folder: Path) -> list[Row]:
    """Read the rows of a folder, refused ones included; none if it has no results yet.

    A last line that was cut off while it was written is left out.

    Raises:
        ConfigError: another line is no row of this version.
    """
    path = folder / RESULTS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows, reasons = [], []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number < len(lines):
                reasons.append(f"line {number} is no JSON: {error}")
            continue
        if not isinstance(row, dict) or NEEDED - row.keys():
            reasons.append(f"line {number}: expected a row of topkv eval with the field 'key'")
            continue
        rows.append(row)
    if reasons:
        fix = "name another folder with --out, or remove the file"
        raise ConfigError(f"{path} cannot be gone on with", [*reasons, fix])
    return rows


class Results:
    """Rows that have been measured, in a folder or nowhere.

    Args:
        folder: made if it is not there; None for nowhere.

    Attributes:
        rows: rows by key, other runs into the folder included.
    """

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / RESULTS
        self.rows: dict[str, Row] = {}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = {row["key"]: row for row in read_rows(folder)}
        self._write([*self.rows.values()])  # without a line that was cut off

    def done(self) -> set[str]:
        """Return the keys of measured rows; refused ones are tried again."""
        return {key for key, row in self.rows.items() if "refused" not in row}

    def _write(self, rows: Sequence[Row]) -> None:
        if self.path is None:
            return
        beside = self.path.with_suffix(".tmp")
        beside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(beside, self.path)

    def add(self, row: Row) -> None:
        """Keep a row, on the disk too before this returns."""
        self.rows[row["key"]] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
