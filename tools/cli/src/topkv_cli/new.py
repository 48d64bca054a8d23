"""``topkv new``: a plugin package that installs and passes the conformance kit as it is."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from pathlib import Path

import click

from topkv.errors import ConfigError
from topkv.plugins import project, registry
from topkv.plugins.project import canonical
from topkv_cli.render import KINDS, default_root, render, write


@click.command("new", short_help="Start a plugin package.")
@click.argument("name")
@click.option("--kind", required=True, type=click.Choice(list(KINDS)), help="Of the plugin.")
@click.option(
    "--kernels",
    is_flag=True,
    help="Write Triton device functions beside the reference, in one file (kind algorithm).",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Directory of the package, which must not exist; ./topkv-NAME by default.",
)
def command(name: str, kind: str, kernels: bool, output: Path | None) -> None:
    """Start a plugin package with a working reference and the conformance kit.

    NAME is what users write to choose the plugin, without topkv-. With --kernels an algorithm
    begins as one file that has each formula in torch and, behind it, as a device function of
    Triton; the kit tests both, without a GPU too.
    """
    root = output or Path(default_root(name))
    if reasons := stands_in_for(name):
        raise ConfigError("a plugin package cannot be made", reasons)
    texts = render(name, kind, kernels)
    write(texts, root)
    for path in texts:
        click.echo(str(root / path))
    click.echo(f"next: cd {root} && pip install -e '.[testing]' && pytest")


def stands_in_for(name: str) -> list[str]:
    """Return reasons, if any, why a new package cannot have this name: pip replaces a distribution
    by another of its name, and a plugin name that two packages offer is used for neither."""
    name, reasons = canonical(name), []
    dist = default_root(name)
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(dist)
        reasons.append(
            f"the distribution {dist} {version} is installed, and installing the new one would "
            "replace it; choose another name, or uninstall it first"
        )
    if dist in project.packages():
        reasons.append(f"an extra of topkv names the distribution {dist}; choose another name")
    return reasons + [
        f"{record.package} {record.version} offers {record.kind or 'a plugin'} {record.name!r}; "
        "choose another name"
        for record in registry().records()
        if canonical(record.name) == name
    ]
