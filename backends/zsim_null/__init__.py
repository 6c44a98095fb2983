"""The smallest correct backend: it records the operations of a schedule, all at time zero."""

from zsim_null.null_recorder import NullBackend

__all__ = ["NullBackend"]
