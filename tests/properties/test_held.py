"""The global batch that a study holds fixed, whatever axes do to the number of replicas."""

from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.scenario.tables import TrainTable
from zsim_study.study.fixed import Fixed, held


@settings(max_examples=50)
@given(micro=st.integers(1, 64), share=st.integers(1, 512), replicas=st.integers(1, 256))
def test_a_batch_is_kept_whole_with_the_largest_micro_batch_that_divides_it(
    micro: int, share: int, replicas: int
) -> None:
    train = TrainTable(micro_batch_size=micro, gradient_accumulation_steps=3)
    fixed = Fixed(global_batch=share * replicas, micro_batch=1)
    found = held(train, fixed, replicas, {"zero.stage"})
    size = found.micro_batch_size
    assert size is not None
    assert found.global_batch_size == share * replicas
    assert found.gradient_accumulation_steps is None
    assert share % size == 0
    assert [each for each in range(size + 1, micro + 1) if share % each == 0] == []
