"""The page of `zsim serve`, and its server."""
