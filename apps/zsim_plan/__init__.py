"""Answers about settings: `zsim best`, `zsim largest` and the page of `zsim serve`."""
