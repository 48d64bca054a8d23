"""Hook specs: the methods that a plugin of each kind implements.

Each kind has a page: ``algorithm`` (read it first), ``backend``, ``transfer``, ``eviction``,
``topk``, ``engine``, ``observer``, ``keeper``, ``kv_format``, ``host_format``, and ``stage`` for
stages behind an algorithm. A page holds the argument of the kind's factory, such as
``AlgorithmSetup``, and a Protocol whose marked methods are the specs. ``topkv.plugins.discovery``
has the marks ``hookspec`` and ``hookimpl``, and the hooks by which a package returns its entries
(``topkv.entries``). ``topkv.plugins.contract`` checks instances against these pages, and the
package ``topkv-testing`` has tests of each kind.
"""
