"""How Hypothesis runs: by no clock (machines are shared), and with a line that replays a failure.

`make test` takes the profile `ci`, which draws the same each time; all else draws anew.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "zsim", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("zsim"), derandomize=True)
settings.load_profile("zsim")
