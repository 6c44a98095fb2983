"""Pages that a person reads: what a run or a study came to, as text, tables and figures.

Pure: a page is a value, its figures are in the form of Plotly's JSON. `zsim.files.html_page`
makes HTML of it.
"""
