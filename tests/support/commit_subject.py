"""Rules for the subject of a commit, which `.githooks/commit-msg` applies to a message."""

import re
import sys
from pathlib import Path

LENGTH_MAX = 72
"""Longer subjects are cut by `git log --oneline` and by web pages."""

MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
VERBS = """
access address assess bring bypass compress cross discuss dismiss dress embed exceed express feed
focus guess miss need pass ping possess press process progress proceed reassess seed shed spring
string suppress witness
"""
"""Imperatives that end as other forms of verbs do."""

NO_VERBS = """
a an the this that these those it its there what which when where while if all each every no some
any of in on at to for from with without as by and or but not only
"""
"""First words of sentences that are not imperative."""


def problems(message: str) -> list[str]:
    """Return the broken rules of the subject of a commit message, one line each."""
    subject, *rest = message.splitlines() or [""]
    if subject.startswith(MADE_BY_GIT):
        return []
    found: list[str] = []
    if len(subject) > LENGTH_MAX:
        found.append(f"{len(subject)} characters must be at most {LENGTH_MAX}")
    if subject.endswith("."):
        found.append("ends with a period; remove it")
    if rest and rest[0].strip() and not rest[0].startswith("#"):
        found.append("the second line must be empty")
    first = re.match(r"[A-Za-z]+", subject)
    if first is None:
        return [*found, "must begin with a verb"]
    word = first.group()
    if not word[0].isupper():
        found.append(f"{word}: must begin with a capital letter")
    if not is_imperative(word.lower()):
        found.append(f"{word}: must be an imperative, as in 'Add a test' or 'Fix a race'")
    return found


def is_imperative(word: str) -> bool:
    """Return False if `word` has the form of another kind of word or of another tense."""
    if word in VERBS.split():
        return True
    return word not in NO_VERBS.split() and not re.search(r"(ed|ing|[^s]s)$", word)


def main(path: str) -> int:
    """Print the rules that the message in a file breaks, and return the exit code of the hook."""
    found = problems(Path(path).read_text("utf-8"))
    for each in found:
        sys.stderr.write(f"commit subject: {each}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
