"""The server of the local page: few connections at a time, each with a time limit.

Each connection has a thread until it closes. The server closes a connection that does not send
its request or read its response in time; beyond `CONNECTIONS`, it responds 503.
"""

import io
import select
import socket
from contextlib import suppress
from threading import BoundedSemaphore
from time import monotonic  # noqa: TID251  (only a clock can detect a silent client)
from typing import TYPE_CHECKING, Final, TypeAlias

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from typing_extensions import Buffer

Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]
"""Type of a connection in `socketserver`."""

CONNECTIONS: Final = 16
"""Maximum connections at a time, each with a thread; a browser opens six to one server."""

REQUEST_S: Final = 10.0
"""Time limit in seconds for receiving a request, and for sending its response."""

BUSY: Final = (
    b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 28\r\n\r\nToo many requests at a time."
)

LEFT: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""Poll events of a connection that the other end has closed."""


class _TimedInput(io.RawIOBase):
    """Input stream of a connection; reads fail after `end_s` (of `monotonic`)."""

    def __init__(self, connection: socket.socket, end_s: float) -> None:
        self._connection, self._end_s = connection, end_s

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "Buffer") -> int:
        """Read available bytes into `buffer` and return their number.

        Raises:
            TimeoutError: no bytes arrive before `end_s`.
        """
        left_s = self._end_s - monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(WSGIRequestHandler):
    """Handler of the one request of a connection."""

    protocol_version = "HTTP/1.0"  # the connection closes after the response

    def setup(self) -> None:
        """Set the time limit of reading the request."""
        super().setup()
        end_s = monotonic() + REQUEST_S
        self.rfile = io.BufferedReader(_TimedInput(self.connection, end_s))

    def run_wsgi(self) -> None:
        """Respond, with a time limit of each write."""
        self.connection.settimeout(REQUEST_S)
        super().run_wsgi()


class PageServer(ThreadedWSGIServer):
    """WSGI server of `application` on a socket that is already listening."""

    def __init__(
        self, address: str, listening: socket.socket, application: "WSGIApplication"
    ) -> None:
        self._free = BoundedSemaphore(CONNECTIONS)
        port = listening.getsockname()[1]
        super().__init__(address, port, application, _Handler, fd=listening.fileno())

    def process_request(self, request: Request, client_address: object) -> None:
        """Handle a request in a new thread; respond 503 if all threads are busy."""
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
        """Handle a request, then release its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def has_left(connection: socket.socket | None) -> bool:
    """Return True if the other end closed the connection; False if `connection` is None."""
    if connection is None:
        return False
    try:
        poll = select.poll()
        poll.register(connection, LEFT)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # the socket is closed on this side
        return True
