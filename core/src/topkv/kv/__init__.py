"""Keys and values on both tiers: their places and their form.

Reading order: ``layout`` (the address of an entry), ``kv_format`` (keys and
values as the model makes them), ``host_pool`` (pages and leases, in memory of ``host_memory``;
``engine_pages`` takes page ids from an engine), ``store`` (the device buffer of a group and its
maps), ``host_format`` (entries of the host as they are on the device, copied by
``entry_kernels``) and ``step`` (the step tensors and their upload). ``held`` counts bytes for
reports. ``topkv.memory.manager`` makes all of them.
"""
