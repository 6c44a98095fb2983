"""An all-to-all on real ranks: values, bytes, and the witness of the run."""

from itertools import chain

import torch
from exchanged_blocks import exchanged
from hand_net import Net, batch, in_fp64
from numbered_blocks import expected, numbered
from shared_ranks import SharedPools
from torch import distributed, nn

from zsim.dtype import DType
from zsim.proof.against_trace import examine
from zsim.schedule.operation import AllToAll, View
from zsim.trace.trace import Trace
from zsim_torch.execute.collectives import received
from zsim_torch.rank_result import merged
from zsim_torch.train import Option, train

STEPS = 3


def on_rank(ranks: int) -> tuple[list[list[float]], Trace, dict[str, torch.Tensor], Trace]:
    """Return received blocks with a trace, and trained parameters with a trace."""
    option = Option(write_back=False, poison=True)
    blocks = train(nn.Identity(), ("",), numbered(ranks), (), steps=2, option=option)
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
    came = blocks.full_parameters()
    values = [[float(each) for each in came[f"came{rank}"]] for rank in range(ranks)]
    trained = {name: value.detach() for name, value in net.named_parameters()}
    return values, blocks.trace, trained, seen.trace


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
    for schedule, place in ((numbered(ranks), 1), (in_fp64(exchanged(ranks)), 3)):
        assert examine(schedule, merged([result[place] for result in found])) == []
    for came, trace, trained, _ in found:
        assert came == [expected(ranks, rank) for rank in range(ranks)]
        sent = {each.bytes for each in trace.ranks[0].transfers if each.collective == "all_to_all"}
        assert sent == {4 * 2 * (ranks - 1)}
        for name, value in net.named_parameters():
            assert torch.allclose(trained[name], value, rtol=0, atol=1e-12)


def test_the_reference_of_replayed_ranks_has_the_same_blocks() -> None:
    view = View(buffer="x", size=6)
    made = AllToAll(id="a", stream="s", group="data", source=view, target=view, wire=DType.FP32)
    sources = [torch.arange(6.0) + 10 * rank for rank in range(3)]
    found = [received(made, place, sources).tolist() for place in range(3)]
    assert found[1] == [2.0, 3.0, 12.0, 13.0, 22.0, 23.0]
    assert sorted(chain.from_iterable(found)) == sorted(torch.cat(sources).tolist())
