"""Dates of what torchtitan published, by which a run's software is told.

A commit message says what was run shortly before; a page of `benchmarks/` has the month in its
name. Listed are the commits whose messages have tokens per second, from before the loop of June
2024 and from after the loss of April 2025: those between are of one kind (`git log` of
pytorch/torchtitan, August 2026).
"""

import re
from datetime import date

BETWEEN = date(2025, 1, 1)
"""Stands for a commit that is not listed."""

COMMITS = {
    date(2024, 3, 28): "83c879f18763",
    date(2024, 6, 6): "40f8fd007957",
    date(2025, 4, 15): "a581e4fe8ce5",
    date(2025, 5, 28): "f8f545c459f7",
    date(2025, 5, 30): "d0ed9b4239e7",
    date(2025, 6, 16): "1ab4353189b0 aae73234d5e8",
    date(2025, 7, 1): "c31ff8b0532c b0902b29a234",
    date(2025, 7, 11): "d54d05a5f7c1",
    date(2025, 7, 14): "db52d57cad7a",
    date(2025, 7, 21): "415f83445a9e",
    date(2025, 7, 24): "f3e2a75e1518",
    date(2025, 8, 1): "b109f7d713fe",
    date(2025, 8, 5): "a204e3188e92",
    date(2025, 8, 22): "f738a03bf45e 8a749c618774",
    date(2025, 8, 29): "d48445865f69 25413d224c5a",
    date(2025, 9, 6): "c4e2291155a4",
    date(2025, 9, 17): "d66b72a6ac57",
    date(2025, 10, 14): "92ed8b318513 d15b59fc06de",
    date(2025, 10, 17): "951f6ff4841b",
    date(2025, 11, 15): "d9bdfbb20695",
    date(2025, 12, 17): "36a4b69426f4",
    date(2026, 2, 26): "6a74d747c6d9",
    date(2026, 3, 4): "ab5ed59f8c0f",
    date(2026, 3, 12): "0691f514f292 cdd75d35d4b5 4ca46c52cffe",
    date(2026, 3, 13): "fca8ab7bed98 4801b184c8e5 72f89d2061b4",
    date(2026, 3, 30): "63a80b2be9ed",
    date(2026, 4, 6): "0e0590c13759",
    date(2026, 4, 8): "036433a1c9d4",
    date(2026, 4, 28): "a364b4b4fd6a",
    date(2026, 4, 30): "0138bde85c16 115f4c9cfce6",
    date(2026, 5, 1): "14f6a75ee4ea",
    date(2026, 5, 8): "e917ff4cf993",
    date(2026, 5, 20): "83e490429cc5",
    date(2026, 6, 2): "37ea3f1c4a30 27aa49077c43",
    date(2026, 6, 4): "e4b1220d7f5e",
    date(2026, 6, 5): "2e998c0b1cc5",
    date(2026, 6, 9): "9d3c7d205a98",
    date(2026, 6, 16): "aa1d37414426",
    date(2026, 7, 20): "af35cfb1567f c95b211bcc5b 7a3dab724961",
    date(2026, 8, 3): "95e42269f9c6",
    date(2026, 8, 5): "bcc09297a1d8",
}

_BY_COMMIT = {commit: day for day, commits in COMMITS.items() for commit in commits.split()}


def published_on(source: str) -> date:
    """Return the day on which `source` was published, or `BETWEEN` where it is not known."""
    page = re.search(r"/benchmarks/\w*?_(20\d\d)-?(\d\d)_", source)
    if page is not None:
        return date(int(page.group(1)), int(page.group(2)), 1)
    return _BY_COMMIT.get(source.rpartition("@")[2][:12], BETWEEN)
