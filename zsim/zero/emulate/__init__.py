"""The orders of other runtimes: one module each, composed of the techniques of `zsim.zero`."""
