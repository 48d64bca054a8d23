"""The version of the core."""

VERSION = "0.2.0"
