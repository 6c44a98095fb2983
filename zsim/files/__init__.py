"""Files read and written, and what is installed: scenarios, traces, pages, pictures."""
