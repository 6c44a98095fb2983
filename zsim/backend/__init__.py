"""What a backend is given, and what it owes: jobs, the protocol, values that a run carries."""
