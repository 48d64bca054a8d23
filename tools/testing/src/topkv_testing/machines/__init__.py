"""Machines that test topkv itself, with plugins or doubles in it: authors need none of them.

A suite looks at one plugin; these machines let a whole coordinator, its pools and its storage
live through random histories beside a model. Tests and benchmarks of this repository call it.
The kit takes three parts of it, of which authors see nothing: ``residency`` runs in
``TransferTests``, the coordinator of ``lifecycle_model`` in ``ObserverTests``, and ``fuzz_lanes``
in ``topkv_testing.fuzz``. Nothing here is public. Read ``lifecycle`` first.

* ``lifecycle``: the whole life of requests on a coordinator. ``lifecycle_model`` has the
  coordinator and the model beside it, ``lifecycle_forward`` and ``lifecycle_calls`` the rules,
  ``lifecycle_checks`` the invariants; ``lifecycle_tokens`` has lives in which single tokens are
  selected.
* ``latent``, ``regrained``: the same lives with latent rows and an indexer, and with selections of
  tokens over larger units.
* ``scenarios``: short lives for what random ones meet too seldom.
* ``residency``: histories over a transfer engine alone. ``host_pool``: leases, shares, releases.
* ``dropping``, ``prefixes``, ``quotas``, ``engine_pages``: requests that give pages back, pages
  that outlive requests, tenants, and page ids of an engine.
* ``storage``, ``storage_faults``, ``handed_over``: pages below host memory, storages that fail,
  and requests that one process leaves to the next.
* ``fuzz_lanes``: one group of many lanes. ``delays``: copies that come late.
"""
