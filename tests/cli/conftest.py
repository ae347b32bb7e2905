"""Layers of equal models are traced once."""

from support.traces import remembered

__all__ = ["remembered"]
