"""The transfer engine of the core: the device buffer is a cache over mapped host memory.

``zero_copy`` has a class for each implementation, ``reference.ReferenceTransfer`` and
``triton.TritonTransfer``, and one eviction policy, ``eviction.LeastRecentlyUsed``.

Reading order: ``geometry`` (places of units, and shared hooks), ``reference`` (all that has to be
done, lane by lane), ``eviction``, ``triton`` (one launch a hook), and its kernels:
``kernels`` (plan, load, offload) and ``token_kernels`` (append, store_chunk, fetch), which see
the host through ``entry_kernels``. Nothing is imported here, so that the reference works without
Triton.
"""
