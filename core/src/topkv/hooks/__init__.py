"""Hook specs: one page for each kind of plugin."""
