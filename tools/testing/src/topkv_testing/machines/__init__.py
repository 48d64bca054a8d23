"""State machines of hypothesis, and the lanes of the fuzzer. Read ``lifecycle`` first.

* ``lifecycle``: the whole life of requests on a coordinator. ``lifecycle_model`` has the
  coordinator and the model beside it, ``lifecycle_forward`` and ``lifecycle_calls`` the rules,
  ``lifecycle_checks`` the invariants; ``lifecycle_tokens`` has lives in which single tokens are
  selected.
* ``latent``, ``regranulated``: the same lives with latent rows and an indexer, and with selections
  of tokens over larger units.
* ``scenarios``: short lives for what random ones meet too seldom.
* ``residency``: histories over a transfer engine alone. ``host_pool``: leases, shares, releases.
* ``fuzz_lanes``: one group of many lanes, for ``topkv_testing.fuzz``.
"""
