"""Attention that skips keys which matter little."""
