"""A decode step of a layer: select, plan, load. Read ``layers`` first, then ``selectors``."""
