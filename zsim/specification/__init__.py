"""One step of plain training on exact numbers, the reference of proofs."""
