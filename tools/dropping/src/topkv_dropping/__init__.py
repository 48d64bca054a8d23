"""Pages that a request gives back while it generates, by the scores of a stage.

Reading order: ``stage`` (the base class of stages that score pages, and when it is refused),
``dropping`` (which pages go, and how the others move up).
"""
