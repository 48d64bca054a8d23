"""The tier below host memory: pages of prompts that a storage keeps, for other processes too.

Reading order: ``tier`` (what is stored and fetched, and when), ``fetching`` (one prompt whose
pages are on their way), ``calls`` (threads that call a storage, and when it is left alone),
``places`` (where the bytes of a page lie), ``objects`` (the form of an object, and its check).
Beside them: ``sessions`` (whole requests, by name), ``opened`` (a storage that is asked and
waited for).

Threads other than the one that runs forwards touch host memory alone: a call to the device would
disturb a CUDA graph that is being captured.
"""
