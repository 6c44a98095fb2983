"""If no setting fits, `best` names GPUs, or shorter sequences, with which a plain one does."""

import json
from pathlib import Path

import pytest

import zsim
from zsim.api.forecast import forecast
from zsim_plan.answer.best_question import question_of
from zsim_plan.answer.more_gpus import more_gpus


def fits(model: str, gpus: int, length: int) -> bool:
    """Return True if full checkpointing with FSDP2 fits on `gpus` RTX 3090 by its simulation."""
    question = question_of(model, f"{gpus}x3090")
    tables = {
        **question.tables,
        "model": {"name": model, "sequence_length": length},
        "parallel": {"data": gpus},
        "zero": {"emulate": "fsdp2", "stage": 3},
        "activations": {"checkpointing": "full"},
        "train": {"precision": "bf16", "micro_batch_size": 1, "gradient_accumulation_steps": 1},
    }
    found = forecast(tables)
    assert not isinstance(found, str)
    return found.fits


def test_the_fewest_gpus_that_are_named_fit_and_half_of_them_do_not() -> None:
    told = more_gpus(question_of("llama2-13b", "1x3090", {"model.sequence_length": 1024}))
    assert told.startswith("16 GPUs on 2 nodes: FSDP2, ZeRO-3, full checkpointing takes ")
    assert fits("llama2-13b", 16, 1024)
    assert not fits("llama2-13b", 8, 1024)


def test_shorter_sequences_are_named_where_more_gpus_do_not_suffice() -> None:
    told = more_gpus(question_of("llama3.1-70b", "8x3090", {"model.lora.rank": 16}))
    assert " with --sequence " in told


def test_a_question_that_fixes_other_settings_gets_no_such_line() -> None:
    question = question_of("llama2-13b", "1x3090", {"parallel.tensor": 1, "zero.stage": 1})
    assert more_gpus(question) == ""


def test_a_training_that_takes_too_long_gets_the_gpus_that_end_it_in_time() -> None:
    asked = question_of("gpt2", "1xh100", tokens=10**11, within_s=2 * 86_400)
    told = more_gpus(asked)
    gpus, days = int(told.split()[0]), float(told.split(" takes ")[1].split()[0])
    assert gpus > 1
    assert days < 2
    found = zsim.best(
        "gpt2", "1xh100", among=["fsdp2"], tokens=10**11, within_s=2 * 86_400, workers=1
    )
    facts = dict(found.facts())
    assert facts["best"] == "none is fast enough for --within"
    assert facts["enough"] == told


def test_the_answer_has_the_line() -> None:
    found = zsim.best("llama2-7b", "1x3090", among=["fsdp2"], batch_tokens=2**17, workers=1)
    assert dict(found.facts())["best"] == "none fits"
    assert dict(found.facts())["enough"].startswith("16 GPUs")


@pytest.mark.parametrize(
    ("name", "title"), [("small.json", "small.json"), ("config.json", "mine/config.json")]
)
def test_the_title_of_an_answer_names_a_file_without_the_folders_above_its_own(
    tmp_path: Path, name: str, title: str
) -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    path = tmp_path / "mine" / name
    path.parent.mkdir()
    path.write_text(json.dumps(shape), "utf-8")
    assert question_of(str(path), "2x3090").tables["title"] == f"{title} on 2 RTX-3090-24GB"
