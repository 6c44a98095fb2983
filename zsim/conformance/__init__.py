"""The conformance suite: what every backend owes, as tests that ship.

    python -m zsim.conformance NAME

runs it against the backend that is registered as NAME. It needs pytest, which the extra
`conformance` brings.
"""
