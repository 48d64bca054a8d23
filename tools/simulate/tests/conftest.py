"""Where modules that tests share are found."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # asked_histories lies beside the tests
