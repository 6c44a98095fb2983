"""Imports of the fork server, set apart from the collector of cycles when this is the last of them.

Ranks are forks. A collection in a rank would go through all that torch has made while it was
imported, and write to each of its pages, which the ranks share until then.
"""

import gc

gc.collect()
gc.freeze()
