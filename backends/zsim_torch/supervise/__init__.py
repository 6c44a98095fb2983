"""Processes of ranks: started or joined, watched, ended, and blamed when they fail."""
