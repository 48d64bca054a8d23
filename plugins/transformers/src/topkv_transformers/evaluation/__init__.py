"""``topkv eval``: accuracy of algorithms on questions about long contexts, decoded sparse.

Every question is decoded token by token over a fork of a context that was read once, with dense
attention; so what an algorithm keeps of the context was chosen before the question was known.
"""
