"""Mutants of the executor: flights of collectives and messages on a CPU, and their memory."""

from executor_mutant import (
    FLYING,
    RANKS_1,
    RANKS_2,
    RANKS_3,
    RANKS_DEFERRED,
    RANKS_RESERVED,
    SHARED,
    STAGES,
    STAGES_4,
    Mutant,
)

from zsim_torch.execute import collectives, streams
from zsim_torch.execute.collectives import OwnGroup
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.flights import BufferAccess, Flights
from zsim_torch.execute.gloo_exchange import Exchanged, GlooExchange
from zsim_torch.execute.reserve import (
    Reserve,
    _ReservedBlock,  # pyright: ignore[reportPrivateUsage]  # what is changed is private
)
from zsim_torch.execute.streams import CpuStreams

MUTANTS_OF_FLIGHTS = (
    # Who waits for a flight, and when.
    Mutant(
        "an edge to a flight is ignored",
        RANKS_3,
        Flights,
        "before",
        "self.named(entry.after) if entry.after else []",
        "[]",
    ),
    Mutant(
        "the flight before on a stream is not waited for",
        FLYING,
        Flights,
        "before",
        "found.append(on_stream[-1])",
        "pass",
    ),
    Mutant(
        "the flight before of a group is not waited for",
        FLYING,
        Flights,
        "before",
        "found.append(of_group[-1])",
        "pass",
    ),
    Mutant(
        "flights before the one that is waited for go on",
        FLYING,
        streams,
        "closure",
        "stack += flight.before",
        "pass",
    ),
    Mutant(
        "a flight does not know what is before it",
        FLYING,
        CpuStreams,
        "communicate",
        "issued, works, before, self",
        "issued, works, [], self",
    ),
    Mutant(
        "a flight is waited for when what needs it has run",
        RANKS_3,
        CpuStreams,
        "compute",
        "if self._flying.alive and (before := self._flying.before(entry)):\n"
        "        self._land(before)",
        "before, right = self._flying.before(entry), action\n"
        "    action = lambda: (right(), self._land(before))",
    ),
    Mutant(
        "a flight lands without a wait",
        RANKS_2,
        CpuStreams,
        "_land",
        "work.wait()",
        "pass",
    ),
    Mutant(
        "flights land the last one first",
        RANKS_3,
        streams,
        "closure",
        "sorted(found)",
        "sorted(found, reverse=True)",
    ),
    Mutant(
        "flights go on into the next step",
        RANKS_1,
        CpuStreams,
        "end_step",
        "self._land(self._flying)",
        "pass",
    ),
    # Memory of flights.
    Mutant(
        "a free does not wait for flights",
        RANKS_3,
        CpuStreams,
        "home_waits",
        "self._land(users)",
        "pass",
    ),
    Mutant(
        "a buffer is dropped before its flight has landed",
        RANKS_3,
        CpuStreams,
        "home_waits",
        "self._land(users)",
        "drop()\n            self._land(users)",
    ),
    Mutant(
        "a free does not wait for flights of its home",
        FLYING,
        Flights,
        "users",
        "any(touch.buffer == buffer for touch in flight.entry.touches)",
        "False",
    ),
    Mutant(
        "deferred memory of a flight is back at once",
        RANKS_DEFERRED,
        CpuStreams,
        "finish",
        "all(flight.end_ns is not None for flight in users)",
        "True",
    ),
    Mutant(
        "deferred memory forgets the flights of its home",
        FLYING,
        CpuStreams,
        "finish",
        "self._flying.users(home, buffer, uses)",
        "self._flying.named(uses)",
    ),
    Mutant(
        "flights touch nothing",
        FLYING,
        Flights,
        "touch",
        "return any(",
        "return False and any(",
    ),
    Mutant(
        "what a flight reads is written meanwhile",
        FLYING,
        BufferAccess,
        "conflicts",
        "(self.writes or other.writes)",
        "(self.writes and other.writes)",
    ),
    Mutant(
        "parts that overlap are told by their starts",
        FLYING,
        BufferAccess,
        "conflicts",
        "max(self.start, other.start) < min(self.end, other.end)",
        "self.start == other.start",
    ),
    Mutant(
        "a collective is thought to write nothing",
        FLYING,
        Executor,
        "_touches",
        "start + size, access.writes)",
        "start + size, False)",
    ),
    # Exchanges of Gloo, and memory that serves again.
    Mutant(
        "an exchange ends before its parts have come",
        RANKS_3,
        Exchanged,
        "wait",
        "for work in self.works:\n        work.wait()",
        "pass",
    ),
    Mutant(
        "a rank leaves its own part out of a gather",
        RANKS_3,
        GlooExchange,
        "all_gather",
        "own.copy_(source.clone() if inside else source)",
        "pass",
    ),
    Mutant(
        "every part of a gather is the first rank's",
        RANKS_3,
        GlooExchange,
        "all_gather",
        "group.broadcast(part, root)",
        "group.broadcast(part, 0)",
    ),
    Mutant(
        "a mean of parts is their sum",
        SHARED,
        GlooExchange,
        "reduce_scatter",
        "target.div_(ranks)",
        "pass",
    ),
    Mutant(
        "two exchanges have one memory for their parts",
        RANKS_3,
        GlooExchange,
        "reduce_scatter",
        "found = self._reserve.take(source.numel(), source.dtype)",
        "found = self._reserve.take(source.numel(), source.dtype)\n"
        "        made = vars(type(self)).get('made') or {}\n"
        "        type(self).made = made\n"
        "        found = made.setdefault(source.numel(), found)",
    ),
    Mutant(
        "a block is lent while a tensor is on it",
        RANKS_RESERVED,
        _ReservedBlock,
        "is_free",
        "== 2",
        "<= 3",
    ),
    Mutant(
        "a block of another size is lent",
        RANKS_RESERVED,
        Reserve,
        "_block",
        "if block.size == size",
        "if block.size <= size",
    ),
    # Messages.
    Mutant(
        "messages go the other way",
        STAGES_4,
        OwnGroup,
        "peer",
        "(self.place + offset)",
        "(self.place - offset)",
    ),
    Mutant(
        "messages go through the default group",
        STAGES,
        collectives,
        "_hand_over",
        "group = member.process_group",
        "group = None if isinstance(operation, Send | Receive) else member.process_group",
    ),
    Mutant(
        "a message goes elsewhere",
        STAGES,
        collectives,
        "_hand_over",
        "work = receive(target,",
        "work = receive(target.clone(),",
    ),
    Mutant(
        "nobody waits for a message",
        STAGES,
        collectives,
        "_hand_over",
        "work = receive(target, src=member.peer(offset), group=group)",
        "receive(target, src=member.peer(offset), group=group)\n            work = None",
    ),
    Mutant(
        "what has been received is told of no operation",
        STAGES,
        Flights,
        "named",
        "found.append(self._by_operation[edge])",
        "found += [each for each in [self._by_operation[edge]] if not each.entry.is_message]",
    ),
)
