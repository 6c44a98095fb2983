"""Systems, fabrics and hardware profiles as data, every number with its source beside it."""
