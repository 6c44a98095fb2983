"""One's own model, GPU and node on the local page: pasted files, which name no other file."""

import re
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_page_client import CONFIG, got, local_client
from werkzeug.test import Client

import zsim
from zsim.cluster.files.template import GPU, NODE
from zsim_plan.page import own_files
from zsim_plan.page.form_fields import GPU_LABELS
from zsim_plan.page.own_files import CONFIG_BYTES, GPU_NUMBERS, HARDWARE_BYTES, own_file
from zsim_plan.page.setting_form import chosen_setting

SIX = {field: example for field, (_, example) in GPU_NUMBERS.items()}
REQUEST_LINE = 65_536
"""Bytes of a request line that `http.server` accepts."""


@pytest.fixture(scope="module")
def client() -> Client:
    return local_client()


def answer(client: Client, **choices: str) -> str:
    return unescape(got(client, "/answer", **choices).text)


def test_six_numbers_are_the_template_of_a_gpu(client: Client) -> None:
    numbers = answer(client, gpu="own", **SIX)
    pasted = answer(client, gpu="own", hardware=GPU)
    step = re.compile(r"gpt2 fits\. A step takes ([\d.]+ ms)\.")
    steps = [found[1] for each in (numbers, pasted) if (found := step.search(each))]
    assert len(steps) == 2
    assert steps[0] == steps[1]


def test_a_pasted_config_is_read_as_a_scenario_reads_its_file(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = {"model": "own", "config": CONFIG, "gpu": "own", **SIX}
    found = answer(client, **choices)
    assert "config.json fits." in found
    assert "<dt>context length</dt><dd>1,024 tokens, the longest of config.json" in found
    assert "zsim-serve" not in found
    assert "zsim-serve" not in got(client, "/report.html", **choices).text
    for name in ("setting.toml", "config.json", "gpu.toml"):
        assert f'">{name}</a>' in found
        saved = got(client, f"/{name}", **choices)
        assert saved.headers["Content-Disposition"] == f"attachment; filename={name}"
        (tmp_path / name).write_text(saved.text, "utf-8")
    monkeypatch.chdir(tmp_path)
    result = zsim.run("setting.toml", check=False)
    assert f"{result.tokens_per_s:,.0f}" in found
    assert got(client, "/node.toml", **choices).status_code == 404


def test_a_pasted_node_has_the_pasted_gpu(client: Client) -> None:
    node = {"gpu": "own", "hardware": NODE, "count": "8"}
    theirs = answer(client, **node)
    assert "gpt2 fits." in theirs
    assert "on H100-SXM5-80GB" in theirs
    assert "usable on Own" in answer(client, **node, **SIX)
    line = "Number of GPUs: 12 must be a multiple of 8, the GPUs of node.toml"
    assert line in answer(client, **{**node, "count": "12"})


@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ({"model": "own"}, "config.json: is empty; paste it, or choose a model"),
        ({"config": "{}"}, "config.json: is given, but Model is 'gpt2'; empty it, or choose your"),
        ({"model": "own", "config": "{"}, "model.hf_config: not JSON: "),
        ({"model": "own", "config": '{"model_type": "x"}'}, "model.hf_config: model_type 'x' must"),
        (
            {"model": "own", "config": "x" * (CONFIG_BYTES + 1)},
            "config.json: has 12 kB, must have at most 12 kB; remove keys and comments that zsim",
        ),
        ({"gpu": "own"}, "GPU memory: is empty; give the numbers of your own GPU, or choose one"),
        ({"gpu_link": "1 GB/s"}, "Link in each direction: is given, but GPU is 'h100'; empty it"),
        (
            {"gpu": "own", "gpu_memory": "80 GB"},
            "Memory bandwidth: is empty; your own GPU needs it, such as 3350 GB/s",
        ),
        ({"gpu": "own", **SIX, "gpu_memory": "80"}, "gpu.toml: memory: '80' is not a quantity"),
        (
            {"gpu": "own", **SIX, "hardware": GPU},
            "GPU or node as TOML: is a GPU, as the numbers above are; remove one of the two",
        ),
        ({"gpu": "own", "hardware": "gpus"}, "GPU or node as TOML: not TOML: "),
        (
            {"gpu": "own", "hardware": 'x = "' + "x" * HARDWARE_BYTES + '"'},
            "GPU or node as TOML: has 4.01 kB, must have at most 4 kB",
        ),
        ({"gpu": "own", "hardware": "[node]\ngpus = 8"}, "node.toml: node.nics, gpu, nic: missing"),
        (
            {"precision": "fp64"},
            "Precision: 'fp64': did you mean fp16? It must be empty, or one of bf16, ",
        ),
        ({"lora": "8", "runtime": "megatron-1"}, "frozen parameters are not modelled for Megatron"),
        ({"context": "4"}, "Context parallel: 4 must divide the 2 data-parallel ranks"),
        ({"length": "long"}, "Context length: 'long' must be a whole number, at least 1"),
    ],
)
def test_a_wrong_file_or_choice_is_told_in_one_line(
    choices: dict[str, str], line: str, client: Client
) -> None:
    shown = re.fullmatch(r'<p class="answer no">(.*)</p>', answer(client, **choices))
    assert shown is not None
    assert line in shown[1]


@pytest.mark.parametrize("key", ["gpu", "node"])
def test_a_pasted_file_cannot_name_another_file(key: str, client: Client, tmp_path: Path) -> None:
    secret = tmp_path / "secret.toml"
    secret.write_text('password = "xyzzy"', "utf-8")
    text = NODE.replace('"h100_sxm5_80gb"', f'"{secret}"') if key == "gpu" else f'node="{secret}"'
    found = answer(client, gpu="own", hardware=text, count="8")
    assert '<p class="answer no">' in found
    assert "xyzzy" not in found
    assert "password" not in found


@given(st.sampled_from(["config", "hardware", *GPU_LABELS]), st.text(max_size=60))
def test_any_pasted_text_is_taken_or_told_in_one_line(name: str, text: str) -> None:
    choices = {"model": "own", "config": CONFIG, "gpu": "own", "count": "1", **SIX, name: text}
    try:
        setting = chosen_setting(choices)
        assert zsim.load(setting.tables()).tables == setting.tables()
    except zsim.MistakeError as error:
        assert str(error)  # noqa: PT017  (either is right)
        assert "\n" not in str(error)  # noqa: PT017


def test_an_address_has_room_for_the_largest_files() -> None:
    every = dict.fromkeys(GPU_LABELS, "%" * 60)
    every |= {"config": "%" * CONFIG_BYTES, "hardware": "%" * HARDWARE_BYTES}
    assert len(urlencode(every)) < REQUEST_LINE - 5_000


def test_equal_files_are_written_once_and_old_ones_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_files, "FILES_MAX", 5)
    paths = [Path(own_file("gpu.toml", f"number = {each}")) for each in range(8)]
    assert own_file("gpu.toml", "number = 7") == str(paths[7])
    assert [each.is_file() for each in paths] == [False] * 3 + [True] * 5
    assert {each.parent.parent.stat().st_mode & 0o777 for each in paths} == {0o700}


def test_two_answers_say_in_which_choices_they_differ_and_which_is_faster(client: Client) -> None:
    found = answer(client, **{"kept.count": "4", "price": "2", "kept.price": "4"})
    first, second = found.split("<section>")[1:]
    assert "<h2>A, kept</h2><p>Number of GPUs: 4; Price of a GPU hour: 4</p>" in first
    assert "<h2>B, on the form</h2><p>Number of GPUs: 2; Price of a GPU hour: 2</p>" in second
    speeds = [
        float(each.replace(",", "")) for each in re.findall(r"<b>([\d,]+)</b><span>all", found)
    ]
    verdict = re.search(r"B trains ([\d.]+) times as many tokens a second as A", found)
    assert verdict is not None
    assert float(verdict[1]) == pytest.approx(speeds[1] / speeds[0], abs=0.006)
    money = re.search(r"and costs ([\d.]+) times as much; they differ by (?:no )?more than", found)
    assert money is not None
    assert float(money[1]) == pytest.approx(0.5 * 2 * speeds[0] / (4 * speeds[1]), abs=0.006)


def test_a_comparison_without_an_answer_says_which_one_lacks_it(client: Client) -> None:
    assert "A has no answer" in answer(client, **{"kept.count": "12"})
    full = {"gpu": "4090", "model": "gpt2-xl", "micro": "32", "checkpointing": "none"}
    found = answer(client, **full, **{"kept.micro": "1", "kept.model": "gpt2"})
    assert "B does not fit, so the two cannot be compared." in found


def test_an_unknown_key_of_either_setting_is_refused(client: Client) -> None:
    for path in ("/", "/answer"):
        for key, line in (
            ("wings", "wings: unknown key; 'wings' must be one of "),
            ("kept.wings", "wings: unknown key; "),
            ("kept.kept.count", "kept.count: unknown key; 'kept.count'"),
        ):
            found = unescape(got(client, path, **{key: "1"}).text)
            assert f'<p class="answer no">{line}' in found


def test_the_kept_setting_is_in_the_page(client: Client) -> None:
    page = got(client, "/", **{"kept.count": "4", "kept.host": "'<b>"}).text
    kept = re.search(r"data-kept='([^']*)'", page)
    assert kept is not None
    assert '"count": "4"' in kept[1]
    assert "<b>" not in kept[1]
    assert '<input type="hidden" name="kept.count" value="4">' in page
