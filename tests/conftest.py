"""How Hypothesis runs: no deadline (machines are shared), and a line that replays a failure."""

from hypothesis import settings

settings.register_profile("zsim", deadline=None, print_blob=True)
settings.load_profile("zsim")
