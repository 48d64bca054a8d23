"""The command ``topkv``; what it shows comes from ``topkv_cli.group`` and its modules."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        print(f"the command topkv needs {error.name}: pip install 'topkv[cli]'", file=sys.stderr)
        sys.exit(1)
    from topkv_cli.group import topkv

    topkv(prog_name="topkv")
