"""``topkv eval``: accuracy of algorithms on questions about long contexts, decoded sparse.

Every question is decoded token by token over a fork of a context that was read once, with dense
attention; so what an algorithm keeps of the context was chosen before the question was known. An
algorithm that uses a model's own indexer selects for the context too, as the model was trained.
"""

# SnapKV gives 256 places of its budget to generated tokens by default; most tasks need fewer.
ALGORITHMS = "quest,double_sparsity,pariskv,clusterkv,snapkv:generated={steps},streaming_llm,exact"
"""Algorithms that are compared by default, if installed; ``steps`` is ``LEAST_STEPS``, or what the
longest question needs."""

LEAST_STEPS = 32

BUDGETS, QUESTIONS = "2%,10%", 20
"""Default budgets, and default questions of each task: few, for somebody waits."""

INDEXED = {"mla": "deepseek_dsa", "gqa": f"trained_gate,{ALGORITHMS}"}
"""Default algorithms where the model brings an indexer, by its attention."""
