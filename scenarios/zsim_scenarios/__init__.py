"""The paper's experiments and what-if studies, as scenario files."""
