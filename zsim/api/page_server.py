"""The server of the local page: few connections at a time, each with its time to say and to hear.

A connection has a thread from its first byte to its last. One that does not finish its request in
time, or does not read its answer, is closed; one beyond `CONNECTIONS` gets 503.
"""

import io
import select
import socket
from contextlib import suppress
from threading import BoundedSemaphore
from time import monotonic  # noqa: TID251  (a client that says nothing is seen by a clock alone)
from typing import TYPE_CHECKING, Final, TypeAlias

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from typing_extensions import Buffer

Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]
"""A connection, as `socketserver` has it."""

CONNECTIONS: Final = 16
"""Connections at a time, each with a thread; a browser opens six to one server."""

REQUEST_S: Final = 10.0
"""How long a request may take until it is complete, and how long its answer until it is read."""

BUSY: Final = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 28\r\n\r\nToo many requests at a time."
)

LEFT: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""Events of a connection whose other end is closed."""


class _TimedInput(io.RawIOBase):
    """Bytes of a connection until `end_s`, by `monotonic`."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self._connection, self._end_s = connection, end_s

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "Buffer") -> int:
        """Read some bytes.

        Raises:
            TimeoutError: they do not come in time.
        """
        left_s = self._end_s - monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(WSGIRequestHandler):
    """One request of one connection."""

    protocol_version = "HTTP/1.0"  # a connection is over with its answer

    def setup(self) -> None:
        """Read the request within its time."""
        super().setup()
        end_s = monotonic() + REQUEST_S
        self.rfile = io.BufferedReader(_TimedInput(self.connection, end_s))

    def run_wsgi(self) -> None:
        """Answer, to a client that reads within its time."""
        self.connection.settimeout(REQUEST_S)
        super().run_wsgi()


class PageServer(ThreadedWSGIServer):
    """A server of `application` on a socket that listens already."""

    def __init__(
        self, address: str, listening: socket.socket, application: "WSGIApplication"
    ) -> None:
        self._free = BoundedSemaphore(CONNECTIONS)
        port = listening.getsockname()[1]
        super().__init__(address, port, application, _Handler, fd=listening.fileno())

    def process_request(self, request: Request, client_address: object) -> None:
        """Answer in another thread, if there is one."""
        if not self._free.acquire(blocking=False):
            with suppress(OSError):
                connection = request if isinstance(request, socket.socket) else request[1]
                connection.settimeout(0)
                connection.send(BUSY)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Request, client_address: object) -> None:
        """Answer, and let another connection have the thread's place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def has_left(connection: socket.socket | None) -> bool:
    """Return True if the other end of a connection is closed; False of none."""
    if connection is None:
        return False
    try:
        poll = select.poll()
        poll.register(connection, LEFT)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # closed here
        return True
