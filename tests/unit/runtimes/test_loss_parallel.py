"""Cross entropy over a vocabulary that the tensor axis cuts, and FSDP2 without that."""

import pytest
from exact_training import proves_and_trains
from fitting import fitting

from zsim.config_error import ConfigError
from zsim.model.architecture import GPT, Llama
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllGather, Copy
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.strategy.execution import Loss
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2

LLAMA = Llama(layers=1, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
TIED_GPT = GPT(
    layers=1,
    hidden_size=8,
    attention_heads=2,
    sequence_length=4,
    vocab_size=7,
    tied_embeddings=True,
)
LOSS_PARALLEL = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=3, emulate=FSDP2()),
    train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
)
WHOLE = LOSS_PARALLEL.but({"zero.emulate": FSDP2(disable_loss_parallel=True)})


def model_of(strategy: Strategy, shape: Llama | GPT = LLAMA) -> Model:
    return fitting(replace(shape, execution=strategy.execution), strategy)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("shape", [LLAMA, TIED_GPT], ids=["Llama", "padded vocabulary, tied"])
@pytest.mark.parametrize("loss", [Loss.TORCH, Loss.FUSED, Loss.CHUNKED])
def test_gathered_logits_train_what_plain_data_parallelism_does(
    shape: Llama | GPT, loss: Loss
) -> None:
    strategy = WHOLE.but({"train.loss": loss})
    model = model_of(strategy, shape)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def edited(made: Schedule, part: str, **changes: object) -> Schedule:
    """Return `made` with changes in the first operation whose id has `part`."""
    program = made.programs[0]
    found = next(each for each in program.step if part in each.id)
    step = tuple(replace(each, **changes) if each is found else each for each in program.step)
    return replace(made, programs=(replace(program, step=step),))


def test_a_rank_that_keeps_the_part_of_another_is_found() -> None:
    model = model_of(WHOLE)
    made = make_schedule(model, WHOLE)
    copy = next(
        each
        for each in made.programs[0].step
        if isinstance(each, Copy) and "/own/head/logits" in each.id
    )
    first = replace(copy.source, axis=None)  # the part of the first rank, on all
    assert any(
        each.invariant == "values" for each in check(edited(made, copy.id, source=first), model)
    )


def test_logits_of_the_whole_vocabulary_are_gathered_once_and_their_gradients_never() -> None:
    def gathered(strategy: Strategy) -> list[int]:
        (program,) = make_schedule(model_of(strategy), strategy).programs
        return [
            each.target.size
            for each in program.step
            if isinstance(each, AllGather) and "logits" in each.id
        ]

    tokens, steps = LLAMA.sequence_length, 2
    assert gathered(LOSS_PARALLEL) == []
    assert gathered(WHOLE) == [tokens * LLAMA.vocab_size] * steps


def test_loss_parallel_keeps_the_logits_of_a_part_of_the_vocabulary() -> None:
    def kept(strategy: Strategy) -> int:
        head = model_of(strategy, replace(LLAMA, vocab_size=4096)).units[-1]
        return sum(segment.saved_bytes for segment in head.segments)

    softmax = LLAMA.sequence_length * 4096 * 4
    assert kept(WHOLE) > softmax
    assert softmax / 2 < kept(LOSS_PARALLEL) < softmax / 2 * 1.01


def test_it_needs_tokens_that_are_cut_and_whole_logits() -> None:
    with pytest.raises(ConfigError, match="disable_loss_parallel: true needs enable_sequence_p"):
        FSDP2(disable_loss_parallel=True, enable_sequence_parallel=False)
    with pytest.raises(ConfigError, match=r"train\.loss: chunked_head never has the whole logits"):
        WHOLE.but({"train.loss": Loss.CHUNKED_HEAD})
