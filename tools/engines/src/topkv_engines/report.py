"""A line at the start of an engine: up to which length requests are dense."""

from __future__ import annotations

import logging

from topkv.config import LoweredConfig

logger = logging.getLogger("topkv.engines")


def whole_up_to(config: LoweredConfig) -> int | None:
    """Return the tokens up to which requests attend to all of theirs, whatever runs beside them;
    None where no layer is sparse, or a stage may leave out some of what was selected."""
    sparse = [group for group in config.groups if group.algorithm]
    if not sparse or any(group.stages for group in sparse):
        return None
    return min(group.budget for group in sparse)


def report(config: LoweredConfig) -> None:
    """Log up to which length requests are dense, where there is one."""
    most = whole_up_to(config)
    if most is not None:
        logger.info(
            "requests of up to %d tokens attend to all of theirs and load nothing; longer ones "
            "attend to as many that are selected",
            most,
        )
