"""Modules of users: their units, run forward and backward, and the `Model` that describes them."""
