"""Parts that engines have in common which schedule requests themselves and serve through topkv.

Reading order: ``requests`` (slots, drafts, the forward of a step), ``session`` (a step of a
worker), ``rows``, ``warm``, ``memory``, ``counts``, ``ranks``.
"""
