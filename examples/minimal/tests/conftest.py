"""For all tests: one thread. The tensors of the kit are small, and more threads only wait."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
