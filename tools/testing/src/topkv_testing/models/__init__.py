"""Doubles, which are small real plugins, and models of truth. Read ``oracle`` first.

Use, where a test needs

* exact attention, or one lane's LRU buffer: ``attention`` and ``LaneModel`` of ``oracle``.
* what a request holds, where its units are and which pages it owns: ``cache_model``.
* every byte on both tiers below a transfer engine: ``topkv_testing.transfer.token_cache``.
* an algorithm that selects the ids of the test: ``Scripted`` of ``doubles``.
* a backend that attends as the formula reads: ``Gather`` of ``doubles``.
* both of them, and plugins of its own, in a registry: ``Entries`` of ``doubles``.
* an algorithm for a model with an indexer, or its scores in float64: ``indexed``.
* a selection that is known without a look at the engine, and an observer that remembers each
  forward: ``engine_doubles``.
* a stage with pools and exact scores, one that changes nothing, or an algorithm that offers given
  candidates: ``stage_doubles``.
* a storage that fails when a test says so: ``storage_doubles``.
"""
