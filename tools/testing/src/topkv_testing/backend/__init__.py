"""The parts of ``topkv_testing.backends``. Read ``bench`` first.

* ``bench``: shapes, guarded memory, and what is expected by the float64 oracle.
* ``cases``: inputs of ``attend``, which ``attend`` tests, and ``queries`` with several a row.
* ``plans``: inputs of ``adapt_page_table``, which ``tables`` tests.
* ``prefill``: inputs and tests of ``prefill``.
* ``device``: graphs, host syncs, wide addresses and host memory, for all three.
"""
