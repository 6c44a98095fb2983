"""Pages that a person reads: what a run or a study came to, as text, tables and figures.

Pure: a page is a value, and so are its figures, which `zsim.report.drawing` draws as SVG.
`zsim.files.html_page` makes HTML of it.
"""
