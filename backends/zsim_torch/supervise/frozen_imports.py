"""Exempt the imports of the fork server from garbage collection; it imports this module last.

Ranks are forks. A garbage collection in a rank would visit all objects that importing torch has
created, and write to their pages, which ranks otherwise share.
"""

import gc

gc.collect()
gc.freeze()
