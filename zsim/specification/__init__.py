"""One step of plain training on exact numbers, for proofs to compare with."""
