"""Placement: every operation reads values that are where it needs them.

Each write makes a version of a range, with a placement for each axis: Shard (ranks hold different
parts), Replicate (copies), Partial (summands). Proved for every role and every way through the
branches:

* an all-gather makes Shard Replicate, a reduce-scatter makes Partial Shard, an all-reduce makes
  Partial Replicate; none is given anything else (an all-reduce of copies multiplies by the ranks);
  a shard along a joined axis is Shard along its parts, and is gathered over all of them;
* copies, casts, divisions keep placements, and what is added to a Partial value is Partial; copies
  by parameter and windows take a rank's own part out of a whole, or put it there;
* forward and backward read parameters that are Replicate over the data axes, and nothing Partial;
* update, norm, clip and finite test read no Partial gradient, and an update changes parameters that
  are placed as its gradient is; clip and branches read what is equal on all ranks: norms and flags
  are Partial over the axes that their gradients are cut along until they are reduced;
* what is received is what the member there sends, and no shard of the receiver's own;
* what is read was written since its memory was allocated;
* what a collective, a copy or an update brings together are the same elements of one tensor, in
  the order that it makes, where layouts say which they are, or what was written there before.

The step starts from what setup leaves; if it leaves other placements behind than it found, it is
gone through once more from those, up to sixteen times; values that still change then are a finding
of `value`.

Assumed: ranks along the data axes of the contract see different data, ranks along other axes hold
slices or copies of parameters as their layouts say, and what a segment writes is Partial where its
operand says so and otherwise as the model has it. A group that has only some of the coordinates of
an axis changes no placement along it.

Cost: one look at each operand, shared with `value`. Axes of one rank are left out.
"""

from zsim.check.finding import Finding
from zsim.check.ledger import PLACEMENT
from zsim.check.subject import Subject

INVARIANT = PLACEMENT


def examine(subject: Subject) -> list[Finding]:
    """Every value that is not placed as its reader needs it."""
    return [finding for finding in subject.flow if finding.invariant == INVARIANT]
