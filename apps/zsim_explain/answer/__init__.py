"""What is said of a trace."""
