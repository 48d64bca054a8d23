"""Operations on tensors that the core and plugins share. All but ``chunk_attention`` can be hot.

Read ``topk`` first (exact top-k, with a defined order of ties). ``chunk_attention`` attends a
prompt chunk to itself and its history. Each has a reference in torch, and kernels in a module
``*_kernels`` that is imported on first use. ``pdl`` is programmatic dependent launch.
"""
