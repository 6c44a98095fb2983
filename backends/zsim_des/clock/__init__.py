"""The clock of a simulation: its alarms, and the queue of walkers that are ready."""
