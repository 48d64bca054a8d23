"""``topkv-lm-eval``, or ``python -m topkv_lm_eval``: the harness's command, with topkv in it."""

from __future__ import annotations

from topkv_cli.ends import reported
from topkv_lm_eval import register


def main() -> None:
    """The command ``lm_eval`` with the model ``topkv``; its arguments are those of ``lm_eval``."""
    from lm_eval.__main__ import cli_evaluate

    register()
    with reported():
        cli_evaluate()


if __name__ == "__main__":
    main()
