"""The error of hardware that cannot exist."""


class ClusterError(ValueError):
    """A cluster that cannot exist; the message starts with the name of the field."""
