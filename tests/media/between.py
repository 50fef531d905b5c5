"""Between an HTTP client and a real server on loopback: answers are changed, withheld, cut."""

import http.client
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Answer", "Between"]

_NOT_HANDED_ON = {"transfer-encoding", "connection", "content-length", "keep-alive"}


@dataclass(frozen=True)
class Answer:
    """What a server says.

    Attributes:
        length: what it claims the body to be; None for what it is.
        piece_bytes, pause_s: so much of the body at a time, where that is not 0.
    """

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: int | None = None
    piece_bytes: int = 0
    pause_s: float = 0.0

    def with_body(self, body: bytes, length: int | None = None) -> "Answer":
        """The same with another body, and the length that it claims to have."""
        return replace(self, body=body, length=length)


class Between:
    """Hands on requests and answers. A context manager.

    Attributes:
        instead: of asking the server; called with method and headers, None to ask it.
        change: of an answer; called with method and answer.
        gate: answers wait while it is shut.
        listens: bodies of requests are not taken in while it is not set.
        seen: requests so far, method and path.
        num_begun: requests so far, those whose bodies are not taken in yet included.
    """

    def __init__(self, port: int) -> None:
        self.instead: Callable[[str, Mapping[str, str]], Answer | None] = lambda method, headers: (
            None
        )
        self.change: Callable[[str, Answer], Answer] = lambda method, answer: answer
        self.gate = threading.Event()
        self.gate.set()
        self.listens = threading.Event()
        self.listens.set()
        self.seen: list[tuple[str, str]] = []
        self.num_begun = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, port))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> "Between":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self.listens.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(between: Between, port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _hand_on(self) -> None:
            between.num_begun += 1
            between.listens.wait(60)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            between.seen.append((self.command, self.path))
            answer = between.instead(self.command, dict(self.headers))
            if answer is None:
                asked = self._ask(body)
                answer = between.change(self.command, asked)
            between.gate.wait(60)
            self._say(answer)

        def _ask(self, body: bytes) -> Answer:
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                headers = {name: value for name, value in self.headers.items()
                           if name.lower() != "connection"}  # fmt: skip
                server.request(self.command, self.path, body, headers)
                found = server.getresponse()
                content = found.read()
                length = found.getheader("Content-Length")
                headers = {name: value for name, value in found.getheaders()
                           if name.lower() not in _NOT_HANDED_ON}  # fmt: skip
                return Answer(found.status, headers, content, int(length) if length else None)
            finally:
                server.close()

        def _say(self, answer: Answer) -> None:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            length = len(answer.body) if answer.length is None else answer.length
            self.send_header("Content-Length", str(length))
            try:
                self.end_headers()
                if self.command != "HEAD":
                    self._say_body(answer)
            except OSError:  # the client has gone
                self.close_connection = True
            if length != len(answer.body) and self.command != "HEAD":
                self.close_connection = True

        def _say_body(self, answer: Answer) -> None:
            size = answer.piece_bytes or max(1, len(answer.body))
            pause = threading.Event()
            for begin in range(0, len(answer.body), size):
                self.wfile.write(answer.body[begin : begin + size])
                if answer.pause_s:
                    pause.wait(answer.pause_s)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _hand_on

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler
