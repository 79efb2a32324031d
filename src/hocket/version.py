"""The version of Hocket."""

__version__ = "0.1.0"
