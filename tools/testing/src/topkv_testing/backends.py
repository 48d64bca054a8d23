"""Conformance of attention backends::

    from topkv_testing.backends import BackendTests

    class TestMyBackend(BackendTests):
        @pytest.fixture
        def plugin(self):
            return "my_backend"

Shapes, scopes and dtypes are drawn from what the entry states; the fixture ``options`` may return
``BackendOptions`` where that is not the whole truth (units that must be multiples of 16, say).
The contract is ``topkv.hooks.backend``. The oracle is attention in float64 over explicit tokens;
a result may be as far from it as plain torch of the same dtype is (``topkv_testing.tolerance``).
"""

from __future__ import annotations

from topkv_testing.backend.attend import AttendTests
from topkv_testing.backend.bench import BackendOptions
from topkv_testing.backend.device import DeviceTests
from topkv_testing.backend.prefill import PrefillTests
from topkv_testing.backend.queries import QueriesTests
from topkv_testing.backend.tables import TableTests

__all__ = ["BackendOptions", "BackendTests"]


class BackendTests(AttendTests, QueriesTests, TableTests, PrefillTests, DeviceTests):
    """Every test of a backend."""
