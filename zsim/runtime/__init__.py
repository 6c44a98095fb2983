"""How other runtimes are configured: their options, under their names, with their defaults."""
