"""Searches of the local page: each in a process that ends with its request, a few in a queue."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from html import unescape
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from local_page_client import CONFIG, SMALL, got, local_client
from werkzeug.test import Client

from zsim_plan.page import page_server, search_child, search_process, setting_search
from zsim_plan.page.form_page import render_answer
from zsim_plan.page.search_process import FULL, WAITING, SearchQueue, searched
from zsim_plan.page.setting_form import chosen_setting

OWN = {"model": "own", "config": CONFIG}

FORKS = """
import json, os, time
if not os.fork():
    time.sleep(600)
print(json.dumps({"done": [os.getpid(), 1]}), flush=True)
"""
SLEEPS = f"{FORKS}\ntime.sleep(600)"


@pytest.fixture(scope="module")
def client() -> Client:
    return local_client()


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the program of the process of a search."""

    def replace(program: str) -> None:
        command = (sys.executable, "-c", program)
        monkeypatch.setattr(search_process, "COMMAND", command)

    return replace


def stays() -> bool:
    return False


def running(group: int) -> list[str]:
    """Return the processes of a group that are no zombies."""
    found: list[str] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(its_group) == group and state != "Z":
            found.append(stat.parent.name)
    return found


def wait_for_the_end_of(group: int) -> None:
    """Wait until all processes of a group have ended: a killed one takes a moment to."""
    while running(group):
        sleep(0.01)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def answer_of(text: str) -> str:
    """Return the HTML of the last line, the only one with an answer."""
    *progress, last = lines_of(text)
    assert all(each.keys() <= {"done", "waiting"} for each in progress)
    return unescape(last["html"])


def test_a_search_ends_with_its_processes_when_its_client_leaves(
    searching: Callable[[str], None],
) -> None:
    searching(SLEEPS)
    queue, left = SearchQueue(), False
    lines = searched(queue, {}, lambda: left)
    group = next(lines)["done"][0]
    assert len(running(group)) == 2
    left = True
    assert list(lines) == []
    wait_for_the_end_of(group)
    assert queue.enter() is not None


def test_a_search_ends_when_nobody_reads_its_answer(searching: Callable[[str], None]) -> None:
    searching(SLEEPS)
    queue = SearchQueue()
    with closing(searched(queue, {}, stays)) as lines:
        group = next(lines)["done"][0]
        assert queue.ahead(queue.enter() or 0) == 1
    wait_for_the_end_of(group)


def test_a_process_that_dies_is_told_in_one_line_although_its_worker_lives(
    searching: Callable[[str], None],
) -> None:
    searching(FORKS)
    first, last = searched(SearchQueue(), {}, stays)
    assert re.fullmatch(
        r"memory: the search ended without an answer; each of its processes may use "
        r"[\d.]+ [MG]B; choose fewer GPUs",
        last["refused"],
    )
    wait_for_the_end_of(first["done"][0])


def test_a_process_that_hangs_ends_after_the_time_limit(
    searching: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    searching(SLEEPS)
    monkeypatch.setattr(search_process, "TIME_S", 0.5)
    monkeypatch.setattr(search_process, "GRACE_S", 0.5)
    found = list(searched(SearchQueue(), {}, stays))
    assert found[-1] == {"refused": "time: took longer than 0.5 s; choose fewer GPUs"}
    for each in found[:-1]:
        wait_for_the_end_of(each["done"][0])


def test_searches_wait_in_their_order_and_one_more_gets_one_line(
    searching: Callable[[str], None],
) -> None:
    searching("print('{\"found\": 1}')")
    queue = SearchQueue()
    tickets = [queue.enter() for _ in range(WAITING)]
    last = searched(queue, {}, stays)
    assert next(last) == {"waiting": WAITING}
    assert list(searched(queue, {}, stays)) == [{"refused": FULL}]
    for ahead, ticket in zip(range(WAITING - 1, 0, -1), tickets, strict=False):
        assert ticket is not None
        queue.leave(ticket)
        assert next(last) == {"waiting": ahead}
    assert tickets[-1] is not None
    queue.leave(tickets[-1])
    assert list(last) == [{"found": 1}]


def test_a_client_that_leaves_while_its_search_waits_leaves_the_queue() -> None:
    queue, left = SearchQueue(), False
    first = queue.enter()
    lines = searched(queue, {}, lambda: left)
    assert next(lines) == {"waiting": 1}
    left = True
    assert list(lines) == []
    assert first is not None
    queue.leave(first)
    assert queue.ahead(queue.enter() or 0) == 0


def test_the_process_of_a_search_ends_when_the_server_does() -> None:
    request = {
        "kind": "search",
        "model": "llama3.1-70b",
        "gpus": "1024xh100",
        "changes": {},
        "options": {},
        "workers": 2,
        "memory_bytes": None,
        "time_s": 600,
    }
    process = subprocess.run(
        search_process.COMMAND,
        input=f"{json.dumps(request)}\n".encode(),  # and then the end of the input
        capture_output=True,
        start_new_session=True,
        check=False,
    )
    assert process.returncode == -9
    assert b"found" not in process.stdout


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        ({"time_s": 0.01}, "time: took longer than 0.01 s; choose fewer GPUs or runtimes"),
        ({"memory_bytes": 10**6}, "memory: needs more than 1 MB; choose fewer GPUs"),
    ],
)
# The child has pytest's and Hypothesis' hooks of the collector, which may run out of memory first.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_search_has_limits(limit: Mapping[str, float], line: str) -> None:
    request = {
        "kind": "search",
        "model": "llama3.1-70b",
        "gpus": "128xh100",
        "changes": {},
        "options": {},
        "workers": 1,
        "memory_bytes": None,
        "time_s": None,
    }
    found = search_child.answer({**request, **limit}, lambda *_: None)
    assert found == {"refused": line}


@pytest.fixture(scope="module")
def found(client: Client) -> Iterator[str]:
    """Answers a short search for a small model on one's own GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting_search, "OPERATIONS", 1)
        yield answer_of(got(client, "/search", **OWN, among="chosen", count="1").text)


def test_the_best_setting_is_shown_in_the_form_with_the_same_step(
    found: str, client: Client
) -> None:
    best = re.search(r"The best: (FSDP2, .*): ([\d.]+ [mu]?s) a step\.", found)
    assert best is not None
    address = re.search(r'href="(/\?[^"]*)">show it in the form</a>', found)
    assert address is not None
    choices = dict(parse_qsl(urlsplit(address[1]).query, keep_blank_values=True))
    assert choices["config"] == CONFIG
    answer = got(client, "/answer", **choices).text
    assert f"config.json fits. A step takes {best[2]}." in answer


def test_a_search_has_the_batch_of_the_form_and_names_pasted_files_alone(found: str) -> None:
    assert "for 1,024 tokens (" in found
    assert 'hf_config = "config.json"' in found
    assert "/tmp" not in found


def test_a_curve_has_the_figures_of_each_number_of_gpus(client: Client) -> None:
    text = answer_of(got(client, "/curve", **OWN, batch="grows", price="2").text)
    rows = re.findall(r'<tr><td class="n">([\d,]+)</td><td class="n">(.*?)</td>', text)
    assert [count for count, _ in rows] == ["1", "2", "4", "8", "16"]
    for count, step in (rows[0], rows[-1]):
        answer = got(client, "/answer", **OWN, count=count).text
        assert f"A step takes {step}." in answer
    assert text.count("<svg") == 2
    assert text.startswith('<p class="answer">config.json on 1 to 16 GPUs, with the same batch of')


def test_a_curve_with_the_batch_of_a_step_says_where_that_cannot_be() -> None:
    asked = chosen_setting({**SMALL, **OWN, "accumulate": "2"})
    points = search_child.curve_points(setting_search.curve_request(asked), lambda *_: None)
    text = unescape(render_answer(setting_search.curve_answer(asked, points)))
    counts = re.findall(r'<tr><td class="n">([\d,]+)</td>', text)
    assert counts == ["1", "2", "4"]
    reason = (
        "<dt>8 GPUs</dt><dd>Curve: the batch: 4 sequences of a step must be a multiple of 8, one "
        "micro-batch of each replica</dd>"
    )
    assert reason in text


@pytest.mark.parametrize("path", ["/search", "/curve"])
@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ({"wings": "2"}, "wings: unknown key; 'wings' must be one of model, count, "),
        ({"count": "12"}, "Number of GPUs: 12 must be at most 8, or a multiple of it"),
        ({"host": "much"}, "cluster.host_memory: 'much' must be a size"),
        ({"tokens": "many"}, "Tokens of the training: 'many' must be"),
    ],
)
def test_a_wrong_choice_of_a_search_is_told_in_one_line(
    path: str, choices: dict[str, str], line: str, client: Client
) -> None:
    text = answer_of(got(client, path, **choices).text)
    shown = re.fullmatch(r'<p class="answer no">(.*)</p>', text)
    assert shown is not None
    assert line in shown[1]


def test_a_search_that_the_form_contradicts_is_told_in_one_line(client: Client) -> None:
    for choices, line in (
        ({"least": "cost"}, "Price of a GPU hour: is empty; a search for the least cost needs it"),
        ({"among": "chosen", "runtime": "zero-3"}, "Search among: a search has no 'zero', zsim's"),
    ):
        assert line in answer_of(got(client, "/search", **choices).text)


def test_a_search_through_the_page_ends_when_its_client_leaves(
    client: Client, searching: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    searching(SLEEPS)
    monkeypatch.setattr(page_server, "has_left", lambda _: True)
    assert got(client, "/search").text == ""
    monkeypatch.setattr(page_server, "has_left", lambda _: False)
    searching('print(\'{"refused": "next"}\')')
    assert "next" in answer_of(got(client, "/search").text)
