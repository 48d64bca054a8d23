"""Parts of suites that let an engine or a coordinator live on: authors need none of them.

* ``residency``: histories over a transfer engine alone, which ``TransferTests`` runs.
* ``lifecycle_model``: a coordinator of doubles, which ``ObserverTests`` runs, and the model beside
  it for the lives of ``tests/machines``.
* ``fuzz_lanes``: one group of many lanes, for ``topkv_testing.fuzz``.
* ``delays``: copies that come late.

Nothing here is public.
"""
