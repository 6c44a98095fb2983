"""`zsim sweep`: finds a study, runs it on all cores or on a cluster, keeps and prints what it says.

What a study is and means stands in `zsim.study`.
"""
