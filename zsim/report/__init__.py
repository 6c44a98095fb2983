"""Report pages: the results of a run or a study as text, tables and figures.

This package does no I/O: pages and figures are values. `zsim.report.drawing` draws figures as SVG,
and `zsim.files.html_page` renders pages as HTML.
"""
