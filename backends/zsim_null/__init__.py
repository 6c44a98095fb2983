"""The smallest correct backend: it records what it is given and takes no time."""

from zsim_null.null_recorder import NullBackend

__all__ = ["NullBackend"]
