"""Path of modules that tests share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # asked_histories is beside the tests
