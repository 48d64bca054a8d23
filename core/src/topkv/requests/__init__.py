"""Requests: the slot, the pages and the length of each. Read ``requests`` first."""
