"""Base classes and kernels that plugins share; the core knows none of them.

Read ``selectors`` first: a selector says what is kept of a unit and what it is worth to a query.
``units`` puts kernels under it, from two device functions (``unit_kernels``, ``token_kernels``,
``language``). ``lane_scores`` combines scores of heads into what a top-k ranks, ``sticky`` adds a
bonus for what is on the device, ``outliers`` takes large channels out of keys that are coded, and
``votes`` lets the end of a prompt vote for what of it is kept.
``latent_fp8`` packs latent rows for backends that read them as bytes.
``page_table`` makes the page table of an attention backend, ``libraries`` finds the optional
library of a plugin, ``tested`` names versions that tests never ran with, and ``contract`` has the
error of a class that does not give what its base class asks for. Kernels are in modules
``*_kernels``, imported on first use.
"""
