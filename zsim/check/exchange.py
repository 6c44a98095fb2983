"""What each send brings to the receives that it may meet, over all roles."""

from zsim.check.content import Contents
from zsim.check.matching import Place, arrivals
from zsim.check.placed import Placement, both
from zsim.check.subject import Subject
from zsim.operation import Operation, Receive, Together

ROUNDS_MAX = 16
"""So often programs are gone through until what they send to each other stays the same."""


class Exchange:
    """Gathers what is sent while programs are gone through, for the next time.

    `contents` are those of all roles: numbers mean the same to sender and receiver.
    """

    def __init__(self, subject: Subject) -> None:
        receives = any(
            _receives(numbered.operations[number])
            for program in subject.programs
            for _, numbered in program.parts
            for number in numbered.communications
        )
        self._meets: dict[Place, list[Place]] = arrivals(subject) if receives else {}
        self.contents = Contents()
        self._sent: dict[Place, Placement] = {}
        self._now: dict[Place, Placement] = {}
        self._rounds = 0

    def send(self, place: Place, placement: Placement) -> None:
        """Take what is sent; of different things at different times, what they have in common."""
        before = self._now.get(place, placement)
        self._now[place] = tuple(map(both, before, placement))

    def receive(self, place: Place) -> Placement | None:
        """What arrives, as far as it is known; nothing is known in the first round."""
        found: Placement | None = None
        for sender in self._meets.get(place, ()):
            sent = self._sent.get(sender)
            if sent is not None:
                found = sent if found is None else tuple(map(both, found, sent))
        return found

    def moves(self) -> bool:
        """Whether what was sent is not what was known, so that it has to be gone through again."""
        moved = bool(self._meets) and self._now != self._sent and self._rounds < ROUNDS_MAX
        self._sent, self._now = self._now, {}
        self._rounds += 1
        return moved


def _receives(operation: Operation) -> bool:
    if type(operation) is Together:
        return any(type(member) is Receive for member in operation.members)
    return type(operation) is Receive
