"""Options of ``topkv eval``, with the defaults of the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from topkv_evaluation import CHECKPOINT
from topkv_evaluation.eval import BUDGETS, QUESTIONS
from topkv_evaluation.tasks.splits import TUNING


@dataclass(frozen=True)
class Options:
    """Options of the user; see ``topkv eval --help``. Without algorithms, the model's defaults."""

    algorithms: Sequence[str] = ()
    model: Path | None = None
    tasks: Sequence[str] = ()
    contexts: Sequence[int] = ()
    budgets: str = BUDGETS
    questions: int = QUESTIONS
    per_context: int = 25
    dense_layers: Sequence[str] = ("none",)
    backend: str | None = "triton_attention"
    impl: str | None = None
    device: str = "cpu"
    batch: int | None = None
    seed: int = 0
    split: str = TUNING
    depths: Sequence[int] | None = None
    question: str = "sparse"
    forced: int = 32
    chat_template: bool = True
    scoring: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"

    @property
    def folder(self) -> Path:
        """Directory of the model."""
        return self.model or CHECKPOINT
