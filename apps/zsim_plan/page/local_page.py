"""`zsim serve`: a page on localhost with a form for a setting and its simulated results."""

import json
import logging
import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock, local
from time import monotonic  # noqa: TID251  (how often a client is looked for)
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from zsim.api.launch import NoRouteError
from zsim.api.launch import run as run_scenario
from zsim.api.remedy_runs import remedy_lines
from zsim.api.run_result import RunResult
from zsim.api.scenario import load, scenario_text
from zsim.files.html_page import need_html
from zsim.limits import stopped_by
from zsim.mistake import MistakeError
from zsim_plan.page.form_fields import form_fields, form_sections
from zsim_plan.page.form_page import render_answer, render_form
from zsim_plan.page.own_files import without_folder
from zsim_plan.page.run_answer import run_answer, side_by_side
from zsim_plan.page.search_process import SearchQueue, searched
from zsim_plan.page.setting_form import FILE, ChosenSetting, chosen_setting
from zsim_plan.page.setting_page import FormAnswer, SettingPage, SideBySide
from zsim_plan.page.setting_search import curve_request, search_answer, search_request

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

    from werkzeug.datastructures import MultiDict
    from werkzeug.wrappers import Request, Response

Given: TypeAlias = "MultiDict[str, str]"
"""Query parameters by key."""

Made = TypeVar("Made")

ADDRESS: Final = "127.0.0.1"
"""The only address that the server listens on: nothing leaves this machine."""

PORT: Final = 8100
PORT_MAX: Final = 65_535
TRUSTED_HOSTS: Final = (ADDRESS, "localhost")
"""Accepted Host headers. A page of another site whose name resolves to this machine (DNS
rebinding) sends its own name.
"""

KEPT: Final = "kept."
"""Prefix of the keys of the setting that is compared: those in which it differs."""

RESULTS: Final = 8
"""Maximum number of results in the cache, for their full pages."""

RESULT_OPERATIONS: Final = 100_000
"""Maximum operations of all cached schedules except the last: half a gigabyte."""

LOOK_S: Final = 0.2
"""Interval in seconds at which a waiting or computing request checks if its client is connected."""

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'"
    ),
}


class LocalPage:
    """The WSGI application: a form, and the results of the chosen setting.

    It simulates one setting at a time, until the client disconnects; the last results are cached.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._keeping = Lock()
        self._results: OrderedDict[str, RunResult] = OrderedDict()
        self._asked = local()
        self._searches = SearchQueue()
        self._context = copy_context()  # the limits of the command apply in the server's threads

    def __call__(self, environ: dict[str, Any], start: "StartResponse") -> Iterable[bytes]:
        """Answer a WSGI request."""
        from werkzeug.exceptions import HTTPException
        from werkzeug.wrappers import Request, Response

        self._asked.connection, self._asked.looked_s = environ.get("werkzeug.socket"), 0.0
        request = Request(environ)
        request.trusted_hosts = list(TRUSTED_HOSTS)
        try:
            _need_local(request)
            response = self._response(request)
        except HTTPException as refused:
            response = Response.force_type(refused.get_response(environ), environ)
        response.headers.update(HEADERS)
        return response(environ, start)

    def _response(self, request: "Request") -> "Response":
        from werkzeug.exceptions import NotFound

        given = request.args
        match request.path:
            case "/":
                return _html(render_form(self._page(given)))
            case "/answer":
                return _html(render_answer(self._answers(given)))
            case "/search":
                return self._lines(given, search_request)
            case "/curve":
                return self._lines(given, curve_request)
            case "/remedies":
                return _html(render_answer(self.remedies(given)))
            case "/report.html":
                return _html(self._text_of(given, lambda each: self._result(each).html()))
            case "/setting.toml":
                text = self._text_of(given, lambda each: scenario_text(each.tables()))
                return _saved(FILE, text)
            case "/config.json" | "/gpu.toml" | "/node.toml":
                name = request.path[1:]
                path = self._text_of(given, lambda each: each.files.get(name, ""), shortens=False)
                if not path:
                    raise NotFound
                return _saved(name, Path(path).read_text("utf-8"))
            case _:
                raise NotFound

    def _page(self, given: Given) -> SettingPage:
        def filled(values: Mapping[str, str]) -> dict[str, str]:
            return {each.name: values.get(each.name, each.default) for each in form_fields()}

        values = filled({name: given[name] for name in given if not name.startswith(KEPT)})
        kept = {name.removeprefix(KEPT): given[name] for name in given if name.startswith(KEPT)}
        return SettingPage(
            sections=form_sections(),
            values=values,
            kept=filled({**values, **kept}) if kept else {},
            answer=self._answers(given),
        )

    def _answers(self, given: Given) -> FormAnswer | SideBySide:
        """Return the answer to the setting, next to that of the kept setting if there is one."""
        try:
            values, kept = _sides(given)
            asked = chosen_setting(values)
            other = None if kept is None else chosen_setting(kept)
        except MistakeError as mistake:
            return FormAnswer(headline=_line(mistake))
        if other is None:
            return self._answer(asked)[0]
        sides = [(each, *self._answer(each)) for each in (other, asked)]
        return side_by_side(sides)

    def _answer(self, asked: ChosenSetting) -> tuple[FormAnswer, RunResult | None]:
        """Return the answer to a setting and its run; None if the setting is invalid."""
        try:
            result = self._result(asked)
            return run_answer(asked, result), result
        except (MistakeError, NoRouteError) as mistake:
            return FormAnswer(headline=_line(mistake)), None

    def _lines(self, given: Given, made: Callable[[ChosenSetting], dict[str, Any]]) -> "Response":
        """Return the progress and the answer of a search, as lines of JSON while it runs."""
        from werkzeug.wrappers import Response

        from zsim_plan.page import page_server

        connection = self._asked.connection

        def lines() -> Generator[str]:
            try:
                asked = chosen_setting(_sides(given)[0])
                request = made(asked)
            except MistakeError as mistake:
                yield _json({"html": render_answer(FormAnswer(headline=_line(mistake)))})
                return
            found = searched(self._searches, request, lambda: page_server.has_left(connection))
            with closing(found):
                for line in found:
                    if "done" in line or "waiting" in line:
                        yield _json(line)
                    else:
                        yield _json({"html": render_answer(search_answer(asked, line))})

        return Response(lines(), mimetype="application/x-ndjson")

    def remedies(self, given: Given) -> FormAnswer:
        """Return the changes with which the setting would fit."""
        try:
            result = self._result(chosen_setting(_once(given)))
            with self._exclusive():
                found = self._context.copy().run(self._stoppable, lambda: result.remedies)
        except (MistakeError, NoRouteError) as mistake:
            return FormAnswer(headline=_line(mistake))
        return FormAnswer(headline="", facts=tuple(remedy_lines(found or ())))

    def _text_of(
        self, given: Given, made: Callable[[ChosenSetting], str], *, shortens: bool = True
    ) -> str:
        """Return the text of `made` for the setting; raise BadRequest if the setting is invalid.

        `shortens` replaces the paths of pasted files with their names.
        """
        from werkzeug.exceptions import BadRequest

        try:
            text = made(chosen_setting(_once(given)))
        except (MistakeError, NoRouteError) as mistake:
            raise BadRequest(_line(mistake)) from None
        return without_folder(text) if shortens else text

    def _result(self, asked: ChosenSetting) -> RunResult:
        """Return the run of a setting, from the cache or simulated now.

        It skips the proof that `zsim run` does first: the runtimes' own schedules are tested.
        """
        key = asked.address
        if (kept := self._kept(key)) is not None:
            return kept
        with self._exclusive():
            if (kept := self._kept(key)) is not None:  # another client requested it
                return kept
            loaded = replace(load(asked.tables()), name=FILE)
            made = partial(
                run_scenario, loaded, check=False, progress=lambda *_: self._need_client()
            )
            result = self._context.copy().run(self._stoppable, made)
            result = result.of_tokens(asked.tokens, price=asked.price)
            self._keep(key, result)
            return result

    def _kept(self, key: str) -> RunResult | None:
        with self._keeping:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def _keep(self, key: str, result: RunResult) -> None:
        """Cache a result, and drop the oldest results beyond the limits."""
        with self._keeping:
            self._results[key] = result
            while len(self._results) > 1 and (
                len(self._results) > RESULTS
                or sum(map(_operations, self._results.values())) > RESULT_OPERATIONS
            ):
                self._results.popitem(last=False)

    @contextmanager
    def _exclusive(self) -> Generator[None]:
        """Let one thread compute at a time.

        Raises:
            ClientDisconnected: the client disconnected while it waited.
        """
        while not self._lock.acquire(timeout=LOOK_S):
            self._need_client()
        try:
            yield
        finally:
            self._lock.release()

    def _stoppable(self, made: Callable[[], Made]) -> Made:
        """Return the result of `made`; stop if the client disconnects."""
        with stopped_by(self._need_client):
            return made()

    def _need_client(self) -> None:
        """Raise ClientDisconnected if the client has disconnected.

        Raises:
            ClientDisconnected: the client has disconnected.
        """
        from werkzeug.exceptions import ClientDisconnected

        from zsim_plan.page.page_server import has_left

        now_s = monotonic()
        if now_s - self._asked.looked_s < LOOK_S:
            return
        self._asked.looked_s = now_s
        if has_left(self._asked.connection):
            raise ClientDisconnected


def _operations(result: RunResult) -> int:
    return sum(len(program.step) for program in result.job.schedule.programs)


def _once(given: Given) -> dict[str, str]:
    """Return the value of each query parameter.

    Raises:
        MistakeError: a key is repeated.
    """
    if twice := next((name for name in given if len(given.getlist(name)) > 1), ""):
        raise MistakeError(f"{twice}: is repeated in the address")
    return given.to_dict()


def _sides(given: Given) -> tuple[dict[str, str], dict[str, str] | None]:
    """Return the values of the setting, and of the kept setting or None.

    Raises:
        MistakeError: a key is repeated.
    """
    every = _once(given)
    values = {name: text for name, text in every.items() if not name.startswith(KEPT)}
    kept = {name.removeprefix(KEPT): every[name] for name in every if name.startswith(KEPT)}
    return values, {**values, **kept} if kept else None


def _need_local(request: "Request") -> None:
    """Refuse requests from other machines and from pages of other sites.

    Raises:
        Forbidden: the request comes from another machine or site.
        SecurityError: the Host header names another host.
        MethodNotAllowed: the method is not GET or HEAD.
    """
    from werkzeug.exceptions import Forbidden, MethodNotAllowed

    _ = request.host  # raises SecurityError
    if request.remote_addr != ADDRESS or request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise Forbidden("This page answers this machine alone.")
    if request.method not in {"GET", "HEAD"}:
        raise MethodNotAllowed(["GET", "HEAD"])


def _html(text: str) -> "Response":
    from werkzeug.wrappers import Response

    return Response(text, mimetype="text/html")


def _saved(name: str, text: str) -> "Response":
    from werkzeug.wrappers import Response

    saved = {"Content-Disposition": f"attachment; filename={name}"}
    return Response(text, mimetype="text/plain", headers=saved)


def _json(line: Mapping[str, object]) -> str:
    return f"{json.dumps(line)}\n"


def _line(mistake: Exception) -> str:
    """Return the message in one line, without file names that the user did not choose."""
    line = without_folder(str(mistake))
    return line.removeprefix(f"{FILE}: ").removeprefix("scenario: ")


class LocalServer:
    """The page on a port of this machine: `with LocalServer(port) as server: server.run()`.

    Attributes:
        address: URL of the page.
    """

    def __init__(self, port: int = PORT) -> None:
        """Listen on `port`; 0 selects a free one.

        Raises:
            MistakeError: the port is taken, or the extra `serve` is not installed.
        """
        try:
            from zsim_plan.page.page_server import PageServer
        except ImportError as error:
            raise MistakeError(f"serve: needs {error.name} (pip install 'zsim[serve]')") from None
        need_html("serve", Path("page.html"))  # raises if the extra is missing
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no log line for each request
        if not 0 <= port <= PORT_MAX:
            raise MistakeError(f"--port: {port}: must be at most {PORT_MAX:,}")
        try:
            listening = socket.create_server((ADDRESS, port))
        except OSError as error:
            raise MistakeError(f"--port: {port}: {os.strerror(error.errno or 0)}") from None
        with listening:  # the server duplicates the descriptor
            self._server = PageServer(ADDRESS, listening, LocalPage())
        self.address = f"http://{ADDRESS}:{self._server.port}/"

    def run(self) -> None:
        """Serve requests until stopped or interrupted."""
        self._server.serve_forever()

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.shutdown()

    def close(self) -> None:
        """Close the port; `run` does so when it ends."""
        self._server.server_close()


def can_show() -> bool:
    """Return True if this machine can show a browser window."""
    has_screen = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return sys.platform != "linux" or bool(has_screen)
