"""Predicts how long a decode step takes and what fits: topkv beside a cache that stays on the GPU.

``machine`` has rates and fixed costs, ``probe`` measures the rates, ``step`` is the model of a
step, and ``report`` asks it what users ask. docs/slower.md says how good it is.
"""
