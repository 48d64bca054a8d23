"""The conformance kit (``pip install topkv[testing]``).

* ``topkv.testing.algorithms.AlgorithmTests``, ``backends.BackendTests``,
  ``transfers.TransferTests``, ``evictions.EvictionTests``, ``engines.EngineTests``: suites that a
  plugin subclasses.
* ``machines``: state machines of host pool, residency and request life.
* ``strategies``: what they draw, for tests of one's own.
* ``oracle``, ``tolerance``, ``cache_model``: the truth, and how near to it is near enough.
* ``fuzz``, ``delays``, ``timing``: tools.
"""
