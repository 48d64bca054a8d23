"""The parts of ``topkv_testing.algorithms``. Read ``bench`` first.

* ``bench``: one layer of an algorithm with its requests; ``options`` are those of an author,
  ``memory`` is what stands around it: pools, ring, page table, step tensors.
* ``case``: one shape with its data. ``cases``: the strategy that draws it.
* ``selection``: what a selection must look like. ``needles``: a key that matches is found.
  ``oracle``: selections against the author's formula in float64.
* ``state``: what is stored follows the keys. ``batch``: requests do not see each other.
* ``kernels``: kernels against the reference, capture, far addresses.
* ``sticky``: a bonus for units that are on the device.
* ``sizes``: the smallest sizes that the algorithm takes. ``correct``: corrections of attention.
* ``index``, ``tokens``: only for models with an indexer, only for algorithms of single tokens.
"""
