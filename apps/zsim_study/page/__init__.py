"""Pages and charts of studies."""
