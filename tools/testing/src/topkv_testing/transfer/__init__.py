"""The parts of ``topkv_testing.transfers``. Read ``bench`` first, then ``token_cache``.

* ``bench``: a group of layers with an engine, and nothing above it. The suite of eviction policies
  and the fuzzer stand on it too.
* ``token_cache``: drives a bench as a coordinator would, and is the truth about both tiers. It
  stands here and not with the other models of truth because it needs a bench.
* ``cases``: benches of a subject, and the shapes that are drawn.
* ``plans``: slots of units, and the order of eviction. ``moves``: every byte that moves.
* ``gpu``: far addresses and replays of a graph.
"""
