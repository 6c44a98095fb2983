"""An all-to-all on real ranks: values, bytes, and the witness of the run."""

from itertools import chain

import torch
from drawn_clusters import NO_MODEL
from exact_training import cluster
from exchanged_blocks import exchanged
from hand_net import Net, batch, in_fp64
from numbered_blocks import block, expected, numbered
from routed_by_hand import Routed
from shared_ranks import SharedPools
from torch import distributed, nn

from zsim.backend.document import Document
from zsim.dtype import DType
from zsim.proof.against_trace import examine
from zsim.schedule.bind import bound
from zsim.schedule.binding import Zipf
from zsim.schedule.operation import AllToAll, View
from zsim.trace.trace import Trace
from zsim_des import SimBackend
from zsim_torch.execute.collectives import received
from zsim_torch.rank_result import merged
from zsim_torch.train import Option, train

STEPS = 3
Trained = tuple[dict[str, torch.Tensor], Trace]
"""Trained parameters, and the trace."""


def exchanged_on_rank(ranks: int, *, uneven: bool) -> tuple[list[list[float]], Trace, Trace]:
    """Return received blocks, a trace with poison, and a trace with a witness."""
    schedule = numbered(ranks, uneven=uneven)
    poisoned, witnessed = (
        train(nn.Identity(), ("",), schedule, (), steps=2, option=option)
        for option in (
            Option(write_back=False, poison=True),
            Option(write_back=False, witness=True, observe=True),
        )
    )
    came = poisoned.full_parameters()
    values = [[float(each) for each in came[f"came{rank}"]] for rank in range(ranks)]
    return values, poisoned.trace, witnessed.trace


def on_rank(ranks: int) -> tuple[list[tuple[list[list[float]], Trace, Trace]], Trained]:
    """Return results of equal and unequal blocks, and of training with equal ones."""
    blocks = [exchanged_on_rank(ranks, uneven=uneven) for uneven in (False, True)]
    net = Net()
    data = [batch(step, distributed.get_rank()) for step in range(STEPS)]
    seen = train(
        net,
        ("layer0", "layer1", "loss"),
        in_fp64(exchanged(ranks)),
        data,
        steps=STEPS,
        option=Option(witness=True, observe=True),
    )
    return blocks, ({name: value.detach() for name, value in net.named_parameters()}, seen.trace)


def test_blocks_arrive_in_order_and_their_sum_trains_as_plain_sgd_does(
    pool_of: SharedPools,
) -> None:
    ranks = 3
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (net(batch(step, rank)) / ranks).backward()
        optimizer.step()
    found = pool_of(ranks).run(on_rank, ranks)
    witnessed = merged([trace for _, (_, trace) in found])
    assert examine(in_fp64(exchanged(ranks)), witnessed) == []
    for trained in (parameters for _, (parameters, _) in found):
        for name, value in net.named_parameters():
            assert torch.allclose(trained[name], value, rtol=0, atol=1e-12)
    for place, uneven in enumerate((False, True)):
        results = [blocks[place] for blocks, _ in found]
        for traces in ([one for _, one, _ in results], [other for *_, other in results]):
            assert examine(numbered(ranks, uneven=uneven), merged(traces)) == []
        for rank, (came, trace, _) in enumerate(results):
            assert came == [expected(ranks, each, uneven=uneven) for each in range(ranks)]
            others = (each for each in range(ranks) if each != rank)
            sent = {each.bytes for each in trace.ranks[0].transfers}
            assert sent == {4 * sum(block(rank, each, uneven=uneven) for each in others)}


PLAN = Routed(ranks=3, experts=6, sent=12, maximum=36, layers=1)
NUMBERS = Zipf(seed=5, busiest=1.4)


def bound_on_rank() -> Trace:
    """Return the trace of a schedule with named counts, at the numbers of a binding."""
    schedule = bound(PLAN.schedule(), NUMBERS).schedule
    option = Option(write_back=False, poison=True)
    return train(nn.Identity(), ("",), schedule, (), steps=2, option=option).trace


def test_books_of_real_ranks_are_those_of_the_simulation_at_equal_counts(
    pool_of: SharedPools,
) -> None:
    job = Document(
        schedule=PLAN.schedule(), model=NO_MODEL, cluster=cluster(3), steps=2, binding=NUMBERS
    ).job()
    trace = merged([*pool_of(3).run(bound_on_rank)])
    assert examine(job.schedule, trace) == []
    simulated = {each.rank: each for each in SimBackend(unfold=True).run(job, seed=0).ranks}
    assert len({each.book for each in trace.ranks}) == 3
    for each in trace.ranks:
        assert each.book == simulated[each.rank].book
        assert each.transfers == simulated[each.rank].transfers


def test_the_reference_of_replayed_ranks_has_the_same_blocks() -> None:
    view = View(buffer="x", size=6)
    made = AllToAll(id="a", stream="s", group="data", source=view, target=view, wire=DType.FP32)
    sources = [torch.arange(6.0) + 10 * rank for rank in range(3)]
    found = [received([made] * 3, place, sources).tolist() for place in range(3)]
    assert found[1] == [2.0, 3.0, 12.0, 13.0, 22.0, 23.0]
    assert sorted(chain.from_iterable(found)) == sorted(torch.cat(sources).tolist())
