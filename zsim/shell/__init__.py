"""The imperative shell: command line, files, what is installed. The core never imports it."""
