"""The command ``topkv storage``: what a directory of the storage ``files`` holds.

Heavy imports wait until one is run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from topkv.errors import ConfigError

if TYPE_CHECKING:
    from topkv_files.folder import Folder, Held

TENANT = click.option("--tenant", metavar="NAME", help="Of this tenant alone; '' is none.")
DIRECTORY = click.argument(
    "path", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIRECTORY"
)
MOST_DAYS = 1e6
JSON = click.option("--json", "as_json", is_flag=True, help="JSON alone on stdout.")


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    from topkv.checks import byte_size

    try:
        return byte_size(int(value) if value.isdecimal() else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _days(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value <= MOST_DAYS:  # nor is nan
        raise click.BadParameter(f"expected days from 0 to {MOST_DAYS:.0f}, got {value}")
    return value


def _folder(path: Path) -> Folder:
    """Open a directory of the storage. Nothing is made."""
    from topkv_files.folder import Folder
    from topkv_files.owned import ForeignError, check

    try:
        check(path)
    except ForeignError as error:
        raise ConfigError(f"{path} is no directory of the storage files", [str(error)]) from error
    return Folder(path)


def _owner(tenant: str | None) -> bytes:
    """Bytes that the keys of a tenant begin with; none if all tenants are meant (None)."""
    from topkv_prefixes.objects import owner_of

    try:
        return b"" if tenant is None else owner_of(tenant)
    except UnicodeEncodeError as error:
        raise click.BadParameter(f"no name that UTF-8 has: {tenant!r}") from error


@click.group("storage", short_help="List, check and prune pages that are stored in a directory.")
def storage() -> None:
    """Pages of prompts that topkv has stored in a directory (the storage plugin files)."""


@storage.command("ls", short_help="What is there, by model and configuration.")
@DIRECTORY
@TENANT
@JSON
def ls(path: Path, tenant: str | None, as_json: bool) -> None:
    """Count the pages in DIRECTORY.

    Pages of one model and configuration have one fingerprint; other ones never find them.
    """
    from topkv_files.survey import fingerprint_of

    found: dict[str, list[Held]] = {}
    owner = _owner(tenant)
    for held in _folder(path).held():
        if not held.key.startswith(owner):
            continue
        found.setdefault(fingerprint_of(held), []).append(held)
    now = time.time_ns()
    rows = [
        {
            "fingerprint": name,
            "pages": len(some),
            "bytes": sum(each.size for each in some),
            "last_used_s": round((now - max(each.used for each in some)) / 1e9),
            "oldest_s": round((now - min(each.used for each in some)) / 1e9),
        }
        for name, some in sorted(found.items())
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("fingerprint", "pages", "size", "last used", "oldest")
    for row in rows:
        ages = (f"{float(row[key]) / 3600:.1f} h ago" for key in ("last_used_s", "oldest_s"))
        table.add_row(
            str(row["fingerprint"])[:12], str(row["pages"]), decimal(int(row["bytes"])), *ages
        )
    Console().print(table)


@storage.command("verify", short_help="Check every page against its checksum.")
@DIRECTORY
@click.option("--delete", is_flag=True, help="Remove what is damaged.")
@JSON
def verify(path: Path, delete: bool, as_json: bool) -> None:
    """Read all pages in DIRECTORY and check them. Ends with 1 if one is damaged.

    A file that does not begin as a page does is left alone, whatever its name is.
    """
    from topkv_files.survey import problem_in

    folder, good, damaged, deleted = _folder(path), 0, {}, set()
    for held in folder.held():
        if (why := problem_in(held)) is None:
            good += 1
            continue
        damaged[held.path] = why
        if delete and folder.let_go(held):
            deleted.add(held.path)
    if as_json:
        click.echo(json.dumps({"good": good, "damaged": damaged, "deleted": delete}, indent=2))
    else:
        for name, why in damaged.items():
            click.echo(f"{name}: {why}{'; removed' if name in deleted else ''}")
        click.echo(f"{good} pages are as they were written, {len(damaged)} are not")
    if damaged:
        raise SystemExit(1)


@storage.command("prune", short_help="Remove what went unused, and what dead writers have left.")
@DIRECTORY
@click.option("--limit", callback=_size, help="Bytes that may stay, such as 100GiB.")
@click.option("--days", type=float, callback=_days, help="Remove what went unused for longer.")
@TENANT
@JSON
def prune(
    path: Path, limit: int | None, days: float | None, tenant: str | None, as_json: bool
) -> None:
    """Make DIRECTORY smaller. Processes that use it go on; they compute what they miss.

    All pages of a tenant go with --tenant NAME --days 0.
    """
    from topkv_files.bounds import Bound

    folder, owner = _folder(path), _owner(tenant)

    def own() -> list[Held]:
        return [held for held in folder.held() if held.key.startswith(owner)]

    before, left = sum(each.size for each in own()), folder.clean()
    if days is not None:
        oldest = time.time_ns() - round(days * 86400e9)
        for held in own():
            if days == 0 or held.used < oldest:
                folder.let_go(held)
    if limit is not None:
        folder.shrink([Bound(limit, owner=owner, low=limit)])
    after = sum(each.size for each in own())
    reported = {"bytes_before": before, "bytes": after, "left_by_dead_writers": left}
    if as_json:
        click.echo(json.dumps(reported, indent=2))
    else:
        click.echo(f"{decimal(before)} before, {decimal(after)} now; removed {left} unfinished")
