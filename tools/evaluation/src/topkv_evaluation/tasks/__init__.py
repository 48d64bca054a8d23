"""Questions about long contexts as text: generators by family, files, and how answers are scored.

A generator makes samples of a length by the tokenizer at hand. The same tokenizer, length and seed
give the same text everywhere: words and haystack are pinned in ``data``, and each call draws from
a generator of its own. Names, templates, draws and scoring of the families of RULER (Hsieh et al.,
2024) are RULER's: where no essay is in play, a sample is the very text that RULER's scripts make
with the same seed.
"""
