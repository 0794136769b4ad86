"""The layers: each binds its weights once, by name, and then has a forward that reads as its formula."""

from .binder import Binder, Numerics

__all__ = ["Binder", "Numerics"]
