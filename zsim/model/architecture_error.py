"""The error of shapes."""


class ArchitectureError(ValueError):
    """A shape that cannot exist; the message starts with the name of the field."""
