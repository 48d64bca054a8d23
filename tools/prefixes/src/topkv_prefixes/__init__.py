"""Pages of prompts that are found again, a tier of storage below them, and suspended requests.

Reading order: ``prefixes`` (what engines call), ``pages`` (the host pool that keeps pages which
nobody holds), ``tier`` (what goes to a storage and comes back, and when), ``fetching`` (one prompt
whose pages are on their way), ``calls`` (threads that call a storage, and when it is left alone),
``places`` (the bytes of a page in memory), ``objects`` (the form of an object, and its check).
Beside them: ``suspended`` (a request taken out of a coordinator, and put into another one),
``stored`` (such requests in a storage, by name), ``opened`` (a storage that is asked and waited
for), ``counts``.

Threads other than the one that runs forwards touch host memory alone: a call to the device would
disturb a CUDA graph that is being captured.
"""
