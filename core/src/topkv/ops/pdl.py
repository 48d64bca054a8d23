"""Programmatic dependent launch: a kernel starts while the one before it still runs.

The earlier kernel calls ``tl.extra.cuda.gdc_launch_dependents``, the later one is launched with
``launch_pdl`` and calls ``gdc_wait`` before it touches what the earlier one writes. Behind a
kernel that makes no such call it starts when that ends, which still hides a part of its launch.
Rules that keep it safe:

* every program of the later kernel waits, also one that has nothing to do: whatever comes behind
  trusts that all is over when that kernel is;
* what a program reads before it waits must be older than the kernel before it: that one is either
  launched plainly, or each of its programs waits first of all and only then calls
  ``gdc_launch_dependents``;
* behind a kernel of somebody else a program waits first of all, and nothing starts early behind
  one that was itself launched early and may return without waiting. Exact top-k may start early
  behind what wrote its scores: a plugin that launches that kernel early lets all of it wait.
"""

from __future__ import annotations

from typing import Any

import torch

_CAPABILITY = (9, 0)


def available(device: torch.device) -> bool:
    """Return True if the device can start a kernel early."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


def options(early: bool) -> dict[str, Any]:
    """Return the launch options of a kernel that may start early; none if ``early`` is False."""
    return {"launch_pdl": True} if early else {}
