"""The parts of ``topkv_testing.engines``. Read ``case`` first.

* ``case``: what the author of an engine is asked for.
* ``bench``: an attached model, beside the oracle for it.
* ``state``: whether a model is what it was before it was attached.

The selection and the observer of the suite are in ``topkv_testing.models.engine_doubles``.
"""
