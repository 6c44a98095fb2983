"""The local page answers what is chosen on it, as `zsim run` does, and this machine alone."""

import re
import socket
import threading
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from time import sleep
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_page_client import HERE, HOST, SMALL, got
from werkzeug.test import Client

import zsim
from zsim.runtimes.lookup import runtimes
from zsim_plan.page import local_page, page_server
from zsim_plan.page.form_fields import ZERO, form_fields
from zsim_plan.page.form_page import render_answer
from zsim_plan.page.local_page import ADDRESS, LocalPage, LocalServer
from zsim_plan.page.setting_form import chosen_setting, offloads
from zsim_plan.page.setting_page import FormAnswer


@pytest.fixture(scope="module")
def client() -> Client:
    return Client(LocalPage())


def test_the_page_has_a_field_for_every_choice_and_the_answer_to_the_first_setting(
    client: Client,
) -> None:
    page = got(client, "/").text
    names = re.findall(r'<(?:select|input|textarea) id="\w+" name="(\w+)"', page)
    assert names == [field.name for field in form_fields()]
    assert '<option value="gpt2" selected>' in page
    assert "gpt2 fits." in page


def test_an_answer_has_the_lines_of_a_run_of_the_scenario_that_is_saved(client: Client) -> None:
    answer, saved = got(client, "/answer").text, got(client, "/setting.toml")
    assert saved.headers["Content-Disposition"] == "attachment; filename=setting.toml"
    result = zsim.run(tomllib.loads(saved.text)).of_tokens(10**9)
    facts = tuple((name, text) for name, text in result.facts() if name != "error")
    assert len(facts) > 5
    again = re.findall(r"<dt>(.*)</dt><dd>(.*)</dd>", answer)
    assert tuple(again) == facts
    assert result.error in answer
    assert f"{result.mfu:.1%}" in answer


def test_the_full_page_is_that_of_the_run(client: Client) -> None:
    page = got(client, "/report.html").text
    assert "<h1>gpt2 on 2 H100</h1>" in page
    assert "zsim run setting.toml" in page


def test_a_price_is_told_as_money(client: Client) -> None:
    assert "money" not in re.findall(r"<span>(\w+)</span>", got(client, "/answer").text)
    dear, cheap = (got(client, "/answer", price=price).text for price in ("100", "0.01"))
    assert all("<span>money</span>" in each for each in (dear, cheap))
    assert "per GPU hour" in cheap
    assert dear != cheap


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("choices", "line"),
    [
        ({"model": "gpt-9"}, "Model: 'gpt-9': did you mean gpt2-xl? It must be one of "),
        ({"count": "12"}, "Number of GPUs: 12 must be at most 8, or a multiple of it"),
        ({"count": "x"}, "Number of GPUs: 'x' must be a whole number, at least 1"),
        ({"gpu": "p5"}, "Number of GPUs: 2 must be a multiple of 8, the GPUs of p5"),
        ({"tensor": "4"}, "Tensor parallel: 4 x 1 stages must divide the 2 GPUs"),
        ({"runtime": "megatron-1", "offload": "all-host"}, "nothing that megatron does"),
        (
            {"pipeline": "2"},
            "gradient_accumulation_steps: 1 must be at least parallel.pipeline = 2",
        ),
        (
            {"runtime": "fsdp1-3", "pipeline": "2"},
            "parallel.pipeline: 2 is modelled for emulate = fsdp2, megatron or nanotron alone",
        ),
        ({"host": "much"}, "cluster.host_memory: 'much' must be a size"),
        ({"tokens": "many"}, "Tokens of the training: 'many' must be"),
        ({"count": "9" * 5000}, "Number of GPUs: '9999"),
        ({"tokens": "9" * 5000}, "Tokens of the training: '9999"),
        ({"host": "9" * 5000 + " GB"}, "cluster.host_memory: '9999"),
        ({"price": "9" * 5000}, "Price of a GPU hour: '9999"),
        ({"optimizer": "adam"}, "optimizer: unknown key; 'optimizer' must be one of model, count"),
        ({"price": "-1"}, "Price of a GPU hour: '-1' must be a number of more than 0"),
    ],
)
def test_a_wrong_choice_is_told_in_one_line(
    choices: dict[str, str], line: str, client: Client
) -> None:
    found = got(client, "/answer", **choices)
    assert found.status_code == 200
    shown = re.fullmatch(r'<p class="answer no">(.*)</p>', found.text.replace("&#39;", "'"))
    assert shown is not None
    assert shown[1].startswith(line) or line in shown[1]
    assert "\n" not in shown[1]
    assert got(client, "/report.html", **choices).status_code == 400


def test_a_key_that_stands_twice_in_an_address_is_refused(client: Client) -> None:
    address = f"/answer?{urlencode(SMALL)}&count=4"
    found = client.get(address, headers=HOST, environ_overrides=HERE)
    assert "count: is repeated in the address" in found.text


@given(st.sampled_from(["count", "tokens", "price", "host"]), st.text() | st.from_regex("[0-9]+"))
def test_any_typed_text_is_taken_or_told_in_one_line(name: str, text: str) -> None:
    try:
        setting = chosen_setting({**SMALL, name: text})
        assert zsim.load(setting.tables()).tables == setting.tables()
        assert setting.price is None or setting.price > 0
        assert setting.tokens is None or setting.tokens > 0
    except zsim.MistakeError as error:
        assert str(error)  # noqa: PT017  (either is right)


def test_a_setting_is_not_simulated_for_a_client_that_left() -> None:
    page = LocalPage()
    here, there = socket.socketpair()
    with here:
        there.close()
        gone = {**HERE, "werkzeug.socket": here}
        for path in ("/answer", "/report.html", "/"):
            address = f"{path}?{urlencode(SMALL)}"
            found = Client(page).get(address, headers=HOST, environ_overrides=gone)
            assert found.status_code == 400
    answered = got(Client(page), "/answer")
    assert "gpt2 fits." in answered.text


def test_work_ends_when_its_client_leaves_and_the_next_client_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page, looks = LocalPage(), 0

    def has_left(_: object) -> bool:
        nonlocal looks
        looks += 1
        return looks == 2

    monkeypatch.setattr(page_server, "has_left", has_left)
    monkeypatch.setattr(local_page, "LOOK_S", 0.0)
    assert got(Client(page), "/answer").status_code == 400
    assert looks == 2
    assert "gpt2 fits." in got(Client(page), "/answer").text


def test_a_search_for_remedies_ends_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"gpu": "4090", "model": "gpt2-xl", "count": "4", "micro": "32", "checkpointing": "none"}
    client = Client(LocalPage())
    assert "does not fit" in got(client, "/answer", **full).text
    monkeypatch.setattr(page_server, "has_left", lambda _: True)
    assert got(client, "/remedies", **full).status_code == 400


def test_a_client_that_leaves_while_it_waits_leaves_the_queue_and_what_is_kept_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = LocalPage()
    client = Client(page)
    before = got(client, "/answer").text
    with page._lock:  # pyright: ignore[reportPrivateUsage]  # as if another client had its turn
        assert got(client, "/answer").text == before
        monkeypatch.setattr(page_server, "has_left", lambda _: True)
        assert got(client, "/answer", micro="2").status_code == 400


def test_as_many_results_are_kept_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_page, "RESULT_OPERATIONS", 1)
    page = LocalPage()
    for micro in ("1", "2"):
        assert got(Client(page), "/answer", micro=micro).status_code == 200
        kept = page._results  # pyright: ignore[reportPrivateUsage]  # no page shows it
        assert len(kept) == 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    monkeypatch.setattr(page_server, "REQUEST_S", 0.5)
    server = LocalServer(0)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield server
    server.stop()
    thread.join()


def connected(server: LocalServer) -> socket.socket:
    port = int(server.address.rpartition(":")[2].strip("/"))
    return socket.create_connection((ADDRESS, port), timeout=60)


def whole_answer(connection: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    found = b""
    with suppress(ConnectionError):
        while part := connection.recv(4096):
            found += part
    return found


def test_requests_that_never_end_have_few_threads_and_leave_in_time(server: LocalServer) -> None:
    before = threading.active_count()
    many = [connected(server) for _ in range(3 * page_server.CONNECTIONS)]
    for each in many[::2]:
        each.send(b"GET /answer HTTP/1.1\r\nHost: 127.0.0.1")
    assert threading.active_count() - before <= page_server.CONNECTIONS
    answers = [whole_answer(each) for each in many]
    busy = [each for each in answers if each]
    assert len(busy) == 2 * page_server.CONNECTIONS
    assert all(each == page_server.BUSY for each in busy)
    with connected(server) as late:
        late.send(f"GET /nothing HTTP/1.1\r\nHost: {server.address[7:-1]}\r\n\r\n".encode())
        assert b" 404 " in whole_answer(late)
    for each in many:
        each.close()


def test_a_request_that_comes_byte_by_byte_has_no_longer_than_another(server: LocalServer) -> None:
    with connected(server) as slow:
        sent = 0
        with suppress(ConnectionError):
            while sent < 10_000:
                sent += slow.send(b"G")
                sleep(0.01)
        assert sent < 10_000


@pytest.mark.one_commit_in(24)
def test_what_does_not_fit_says_what_would_when_it_is_asked(client: Client) -> None:
    full = {"gpu": "4090", "model": "gpt2-xl", "count": "4", "micro": "32", "checkpointing": "none"}
    answer = got(client, "/answer", **full).text
    assert "gpt2-xl does not fit." in answer
    assert re.search(r'data-more="/remedies\?.*model=gpt2-xl', answer)
    assert "<dt>it would fit with</dt>" in got(client, "/remedies", **full).text


@pytest.mark.parametrize("name", [ZERO, *(name for name in runtimes() if offloads(name))])
def test_each_offload_of_a_runtime_can_be_loaded(name: str) -> None:
    runtime = f"{name}-3"
    assert offloads(name)
    for what in offloads(name):
        given = {**SMALL, "gpu": "4090", "runtime": runtime, "offload": what}
        strategy = zsim.load(chosen_setting(given).tables()).strategy
        emulated = strategy.zero.emulate
        assert strategy.offload.uses_host or (emulated is not None and emulated.tiers(stage=3))


def test_what_is_typed_cannot_become_a_part_of_the_page(client: Client) -> None:
    found = got(client, "/", count="<script>alert(1)</script>").text
    assert "<script>alert" not in found
    assert "&lt;script&gt;alert" in found


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8100", "127.0.0.1.evil.example"])
def test_a_page_whose_name_was_made_to_lead_here_gets_no_answer(host: str, client: Client) -> None:
    found = client.get("/answer", headers={"Host": host}, environ_overrides=HERE)
    assert found.status_code == 400


def test_nobody_else_gets_an_answer(client: Client) -> None:
    for address in ("10.0.0.7", "::1", ""):
        found = client.get("/", headers=HOST, environ_overrides={"REMOTE_ADDR": address})
        assert found.status_code == 403
    crossed = {**HOST, "Sec-Fetch-Site": "cross-site"}
    assert client.get("/answer", headers=crossed, environ_overrides=HERE).status_code == 403
    assert client.post("/answer", headers=HOST, environ_overrides=HERE).status_code == 405
    assert got(client, "/etc/passwd").status_code == 404


def test_a_page_may_take_nothing_from_elsewhere(client: Client) -> None:
    policy = got(client, "/answer").headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "connect-src 'self'" in policy


def test_a_server_listens_on_this_machine_alone_and_a_port_is_taken_once() -> None:
    server = LocalServer(0)
    port = int(server.address.rpartition(":")[2].strip("/"))
    assert server.address == f"http://{ADDRESS}:{port}/"
    try:
        with pytest.raises(zsim.MistakeError, match=rf"--port: {port}: Address already in use"):
            LocalServer(port)
    finally:
        server.close()
    with pytest.raises(zsim.MistakeError, match=r"--port: 99999: must be at most 65,535"):
        LocalServer(99999)


def test_an_empty_headline_leaves_no_paragraph() -> None:
    assert "<p" not in render_answer(FormAnswer(headline=""))
