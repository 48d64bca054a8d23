"""Operations on tensors that the core and plugins share. All but ``chunk_attention`` can be hot.

Read ``topk`` first (exact top-k, with a defined order of ties), then ``regranulate`` (from tokens
to the units that hold them), ``lane_scores`` (from scores of heads to what a top-k ranks) and
``page_table`` (from a plan to a page table). Each has a reference in torch, and kernels in a
module ``*_kernels`` that is imported on first use. ``chunk_attention`` attends a prompt chunk to
itself and its history. ``pdl`` is programmatic dependent launch.
"""
