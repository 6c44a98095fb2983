"""Settings without effect and shared NICs are said in a line on standard error."""

import pytest

import zsim
from zsim_plan.answer.best_question import question_of

SELECTIVE = "activations.checkpointing=selective"


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ((SELECTIVE, "model.attention=flash"), True),
        ((SELECTIVE, "model.attention=plain"), False),
        (("activations.checkpointing=full", "model.attention=flash"), False),
    ],
)
def test_selective_checkpointing_of_flash_attention_changes_nothing(
    changes: tuple[str, ...], is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    _ = zsim.load("tiny", changes).source
    said = "activations.checkpointing: selective changes nothing: flash attention"
    assert (said in capsys.readouterr().err) is is_said


@pytest.mark.parametrize(("nics", "is_said"), [(3, True), (4, False), (8, False), (16, False)])
def test_nics_that_gpus_cannot_share_equally_are_explained(
    nics: int, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (f"cluster.nics_per_node={nics}", "cluster.fabric=single_switch")
    question_of("llama3.2-1b", "16xh100", changes)
    found = capsys.readouterr().err
    assert (f"cluster.nics_per_node: {nics} NICs for 8 GPUs: collectives" in found) is is_said
    question_of("llama3.2-1b", "8xh100", changes[:1])  # one node has no fabric
    assert not capsys.readouterr().err


def test_a_search_says_that_selective_checkpointing_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question_of("llama3.2-1b", "8xh100", [SELECTIVE])
    assert "selective changes nothing" in capsys.readouterr().err
