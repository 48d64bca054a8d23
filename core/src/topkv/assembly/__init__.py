"""Assembly of a coordinator: plugins, stages behind an algorithm, and the path of each layer.

Read ``assembly`` first.
"""
