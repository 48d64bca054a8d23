"""The conformance kit (``pip install topkv-testing``).

Public, for tests of plugins:

* ``topkv_testing.algorithms.AlgorithmTests``, ``backends.BackendTests``,
  ``transfers.TransferTests``, ``evictions.EvictionTests``, ``topks.TopKTests``,
  ``observers.ObserverTests``, ``stages.StageTests`` and ``stages.OptionTests``,
  ``storages.StorageTests``, ``engines.EngineTests``: suites that a plugin subclasses.
* ``strategies``: what suites draw, for your own tests.
* ``oracle``, ``tolerance``, ``cache_model``: the truth, and how near to it is near enough.
* ``fuzz``: plan and copies of a transfer engine for hours. ``timing``: how long calls take.

What these are made of, which is not public and may change in any version:

* ``kit``: the base of the suites; read it first. ``tiers``: where they run. ``interpreter``:
  what lets kernels be interpreted faster.
* ``algorithm``, ``backend``, ``transfer``, ``engine``: folders with the parts of a suite. In each,
  ``bench`` holds what is tested, ``case`` or ``cases`` what is drawn or asked of the author.
* ``models``: doubles and models of truth, and which to take for what.
* ``decodes``: whole decodes of an algorithm. ``differences``, ``host_reads``: checks of suites.
  ``pytest_plugin``: tiers and options for pytest. ``compiling``: its option ``--compile-for``.
* ``machines``: coordinators and engines that live on. Authors of plugins need none of them.
"""
