"""Files that are read and written, and installed data: scenarios, traces, pages, pictures."""
