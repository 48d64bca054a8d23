"""Commands load when they are called or listed, and packages bring commands of their own.

An entry point of group ``topkv.commands`` whose name is the command and whose value is
``"module:click_command"`` adds one. Its module is imported for the list of commands too, so it
should import torch only where the command runs. A command that does not import says why when it is
called. A command may raise any error of ``topkv.errors``: the group prints it
(``topkv_cli.ends``).
"""

from __future__ import annotations

import shlex
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from topkv import __version__
from topkv.errors import PluginError
from topkv.plugins.records import BLOCK, aside, blocked
from topkv_cli.ends import reported

COMMANDS = "topkv.commands"

_OWN = {
    "plugins": "topkv_cli.plugins",
    "doctor": "topkv_cli.doctor",
    "new": "topkv_cli.new",
}


ELSEWHERE = {
    "bench": "topkv-bench",
    "calibrate": "topkv-double-sparsity[calibrate]",
    "demo": "topkv-evaluation",
    "eval": "topkv-evaluation",
    "generate": "topkv-evaluation",
    "record": "topkv-simulate",
    "serve": "topkv-engines[serve]",
    "share": "topkv-evaluation",
    "simulate": "topkv-simulate",
    "storage": "topkv-files[cli]",
    "tiers": "topkv-simulate",
}
"""Commands of this project's other packages, and the package of each; a test compares both."""


class LazyGroup(click.Group):
    """A group that imports a command only to run or list it, and prints its errors."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with reported():
            return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_OWN, *_offered()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OWN:
            command: click.Command = import_module(_OWN[cmd_name]).command
            return command
        points = _offered().get(cmd_name, [])
        if len(points) > 1:
            return _disputed(cmd_name, points)
        return _load(cmd_name, points[0]) if points else _missing(cmd_name)


def _missing(name: str) -> click.Command | None:
    """Return a command that says how to get it; None if no package of ours brings it."""
    what = f"there is no command {name!r} here"
    left_out = [point for point in entry_points(group=COMMANDS) if point.name == name]
    if left_out:
        who = " and ".join(map(_package, left_out))
        return _failing(name, what, f"{BLOCK} leaves that of {who} out; take it out of the list")
    if name in ELSEWHERE:
        package = ELSEWHERE[name]
        return _failing(name, what, f"{package} brings it: pip install {shlex.quote(package)}")
    return None


def _offered() -> dict[str, list[EntryPoint]]:
    """Return the entry points of commands by name, without those that ``TOPKV_BLOCK`` names."""
    offered: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=COMMANDS), key=_package):
        if not blocked(_distribution(point), point.name):
            offered.setdefault(point.name, []).append(point)
    return offered


def _distribution(point: EntryPoint) -> str:
    return (point.dist and point.dist.name) or "unknown"


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"


def _load(name: str, point: EntryPoint) -> click.Command:
    try:
        with aside():
            command = point.load()
    except (Exception, SystemExit) as error:
        return _broken(name, point, f"does not import: {type(error).__name__}: {error}")
    if not isinstance(command, click.Command):
        return _broken(name, point, f"is no click command but {type(command).__name__}")
    return command


def _disputed(name: str, points: list[EntryPoint]) -> click.Command:
    own = ", ".join(f"{_distribution(point)}:{name}" for point in points)
    return _failing(
        name,
        f"the command {name!r} is offered by {' and '.join(map(_package, points))}",
        f"none of them is run; uninstall all but one, or add those that are not wanted to "
        f"{BLOCK}: {own}",
    )


def _broken(name: str, point: EntryPoint, problem: str) -> click.Command:
    return _failing(
        name,
        f"the command {name!r} of {_package(point)} ({point.value})",
        f"{problem}; reinstall the package, or install what it needs",
    )


def _failing(name: str, what: str, reason: str) -> click.Command:
    def fail() -> None:
        raise PluginError(what, [reason])

    # Whatever was written behind the name, the answer is the reason.
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(
        name,
        callback=fail,
        context_settings=settings,
        add_help_option=False,
        short_help=f"Does not load; topkv {name} says why.",
    )


@click.command(cls=LazyGroup)
@click.version_option(__version__, package_name="topkv")
def topkv() -> None:
    """Sparse attention over a KV cache in host memory."""
