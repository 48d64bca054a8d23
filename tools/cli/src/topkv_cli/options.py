"""Options and surroundings of commands in several packages. None imports torch before it runs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from topkv.checks import byte_size
from topkv.errors import ConfigError

if TYPE_CHECKING:
    from topkv.config import SparseConfig


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Parameter type: whole numbers with commas between them, each once.

    Args:
        least, most: the range of each.
    """

    name = "n,n"

    def __init__(self, least: int = 1, most: int = 2**63 - 1) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(map(int, value.split(",")))
        except ValueError:
            numbers = ()
        few = not numbers or len({*numbers}) < len(numbers)
        if few or min(numbers) < self.least or max(numbers) > self.most:
            bound = f" and at most {self.most}" if self.most <= 100 else ""
            expected = f"numbers of {self.least} and more{bound} like 1,4,16, each once"
            self.fail(f"expected {expected}, got {value!r}")
        return numbers


class Number(click.FloatRange):
    """A number in a range. Neither nan, which no range refuses, nor infinity is one."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value!r} is not finite.", param, ctx)
        return found


class Size(click.ParamType):  # type: ignore[type-arg]
    """Parameter type: a size such as 16GiB, in bytes."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return byte_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class NewFile(click.Path):
    """Parameter type: a file to write, in a directory that exists.

    Args:
        plot: package whose extra ``plot`` brings matplotlib, where the file is a picture; its
            ending names the format.
    """

    def __init__(self, plot: str = "") -> None:
        super().__init__(path_type=Path, dir_okay=False)
        self.plot = plot

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no directory {path.parent}; make it first", param, ctx)
        if self.plot and find_spec("matplotlib") is None:
            self.fail(f"it needs matplotlib: pip install '{self.plot}[plot]'", param, ctx)
        if self.plot:
            from matplotlib.backends.backend_agg import FigureCanvasAgg

            known = sorted(FigureCanvasAgg.get_supported_filetypes())
            if path.suffix[1:].lower() not in known:
                self.fail(f"expected a name that ends in one of {', '.join(known)}", param, ctx)
        return path


DEVICE = click.option("--device", help="A torch device; by default the GPU if there is one.")
JSON = click.option("--json", "as_json", is_flag=True, help="JSON alone on stdout.")
IMPL = click.option("--impl", help="reference or triton; by default reference on a CPU.")
TRUST = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that comes with the model. Off by default: read that code first.",
)
CONFIG = click.option(
    "--config", "config_file", type=Path, help="YAML or JSON; the options here beat what it says."
)
_SPARSE = (
    click.option("--algorithm", help="Name of the algorithm; see topkv plugins."),
    click.option("--backend", help="Name of the attention backend."),
    click.option("--budget", type=int, help="Attended tokens, sinks and tail included."),
    click.option("--buffer", type=int, help="Tokens of the device buffer."),
    click.option("--unit", type=int, help="Tokens that are selected and moved together."),
    IMPL,
    DEVICE,
)


def sparse(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the settings that are set most, and ``--device``."""
    for option in reversed(_SPARSE):
        command = option(command)
    return command


def config_of(
    file: Path | None, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> SparseConfig:
    """Return settings: the defaults, a file that beats them, and options that beat the file."""
    from topkv.config import SparseConfig

    written = SparseConfig.load(file).as_dict() if file else {}
    given = {name: value for name, value in options.items() if value is not None}
    return SparseConfig(**{**(defaults or {}), **written, **given})


@contextmanager
def answering() -> Iterator[TextIO]:
    """Yield stdout for the answer alone; what anybody else prints meanwhile goes to stderr."""
    # Read when torch is imported. Threads that spin at every small operation of a decode step make
    # it many times slower as soon as another program wants the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    answer = sys.stdout
    with redirect_stdout(sys.stderr):
        yield answer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and advice of Transformers out of what the command prints."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def device_or_default(device: str | None) -> str:
    """Return the device that was named, checked; else the GPU if there is one."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used", [reason]) from error
    return device
