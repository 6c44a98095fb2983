"""Observers of a rank below the executor: storages, operators and collectives."""
