"""What-if studies: `zsim sweep`."""
