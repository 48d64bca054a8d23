"""Stands in for a package that is not installed."""

from standing_in import stand_in

stand_in(__name__)
