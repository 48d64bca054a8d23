"""Machines that test topkv itself, with plugins or doubles in it.

A suite of the kit looks at one plugin; these machines let a whole coordinator, its pools and its
storage live through random histories beside a model. The tests of all packages call them. Read
``lifecycle`` first; its coordinator and the model beside it are
``topkv_testing.machines.lifecycle_model``.

* ``lifecycle``: the whole life of requests on a coordinator. ``lifecycle_forward`` and
  ``lifecycle_calls`` have the rules, ``lifecycle_checks`` the invariants; ``lifecycle_tokens`` has
  lives in which single tokens are selected.
* ``latent``, ``regrained``: the same lives with latent rows and an indexer, and with selections of
  tokens over larger units.
* ``scenarios``: short lives for what random ones meet too seldom.
* ``host_pool``: leases, shares, releases.
* ``dropping``, ``prefixes``, ``quotas``, ``engine_pages``: requests that give pages back, pages
  that outlive requests, tenants, and page ids of an engine.
* ``storage``, ``storage_faults``, ``handed_over``: pages below host memory, storages that fail,
  and requests that one process leaves to the next.
"""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep),
}
"""Environment of programs that import the machines, wherever they are."""
