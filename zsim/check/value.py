"""Value: every operation reads the values that training needs, each with all that belongs to it.

Each write makes a version of a range that says what it is of: a parameter, an activation, the
gradient of either, a norm; of which micro-batches, as how many of the uses that are summed; what it
was multiplied by, as an exact fraction and powers of host scalars; of which step; of which elements
of the tensor. Proved for every role, every way through the branches and any number of steps, where
the contract has parameters:

* forward, recompute and backward read the parameters of this step: no gather, cast or copy of them
  is of a step before, in any element; nothing but an update changes them, and each of them once;
* they read the activations and what was saved that the model names, of their own micro-batch; and
  gradients of outputs to which every segment has contributed that reads the output, once;
* a gradient has been summed over the uses of its parameter and over micro-batches, each once, from
  nothing: what the first sets, the later ones add to, and nothing is left of the step before;
* an update reads a gradient of every micro-batch of the step, divided by the loss divisor of the
  contract, freed of host scalars that have not changed since they were multiplied in, clipped once
  if the strategy clips, and not otherwise; and Adam is given the number of the update;
* norms and finite tests are of gradients that are summed already and not clipped; one that clips
  or decides is of all parameters of the contract, and a norm counts each element once;
* gradients that are added are divided by the same number; a norm is divided as what it clips; no
  parameter is divided, added, or used as a gradient, nor the other way round.

So by induction over the operations every value is the one that a single process computes, and by
induction over steps (what a step leaves, one step older, is what it begins with) so it always is.

Assumed: `placement`, which says that each rank's summand enters a reduction once; `definedness` and
`races`, by which what is issued before is what is read; `partition`, by which a segment's operands
are the model's parameters. Without the model a segment's first forward says what its inputs are,
and contributions to gradients of activations are not counted. What a segment computes from its
operands is the backend's matter. What comes from another rank by `Receive` is known by what it is
of, not by its elements.

Cost: the same look at each operand as `placement`; operands of a segment are gone through once for
all micro-batches, and neighbors in memory are one. A norm costs one look at each piece of layouts.
"""

from zsim.check.finding import Finding
from zsim.check.ledger import VALUE
from zsim.check.subject import Subject

INVARIANT = VALUE


def examine(subject: Subject) -> list[Finding]:
    """Every operand that is not the value that it has to be."""
    return [finding for finding in subject.flow if finding.invariant == INVARIANT]
