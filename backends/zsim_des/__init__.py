"""The simulated world: a schedule runs as discrete events on a modelled cluster."""
