"""``topkv new``: a plugin package that installs and passes the conformance kit as it is."""

from __future__ import annotations

from pathlib import Path

import click

from topkv.cli.render import KINDS, default_root, render, write


@click.command("new", short_help="Start a plugin package.")
@click.argument("name")
@click.option("--kind", required=True, type=click.Choice(list(KINDS)), help="Of the plugin.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Directory of the package, which must not exist; ./topkv-NAME by default.",
)
def command(name: str, kind: str, output: Path | None) -> None:
    """Start a plugin package with a working reference and the conformance kit.

    NAME is what users write to choose the plugin, without topkv-.
    """
    root = output or Path(default_root(name))
    texts = render(name, kind)
    write(texts, root)
    for path in texts:
        click.echo(str(root / path))
    click.echo(f"next: cd {root} && pip install -e '.[testing]' && pytest")
