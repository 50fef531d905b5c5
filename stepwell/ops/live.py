"""The counters of an engine that runs, read from where it exports them."""

import http.client
import io
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_fd_to_metric_families

from stepwell.errors import ConfigError
from stepwell.exporter import PREFIX
from stepwell.settings import parse_target
from stepwell.tiers.directory import StoreDirectory
from stepwell.tiers.files import read_regular

__all__ = ["LiveCounters", "read_live"]

_TIMEOUT_S = 2.0
_MOST_BYTES = 4 << 20  # what an engine exports has some thousand
_MOST_LINE = 16 << 10  # the parser takes the square of a line's length
_MOST_WORDS = 300
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LiveCounters:
    """What an engine exports.

    Attributes:
        target: where it was read, as in the setting ``metrics``.
        error: why it could not be read; empty if it could.
        values: (name, labels) -> value; names without prefix and without "_total".
    """

    target: str
    error: str
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    def by(self, name: str, label: str) -> dict[str, float]:
        """A metric's values summed by one label."""
        found: dict[str, float] = {}
        for (series, labels), value in self.values.items():
            if series == name:
                key = dict(labels).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return {key: found[key] for key in sorted(found)}

    def total(self, name: str) -> float:
        """A metric's sum over all labels."""
        return sum(value for (series, _), value in self.values.items() if series == name)


def read_live(directory: StoreDirectory) -> LiveCounters | None:
    """The counters of the process that owns a store; None if it exports none, or nobody owns it.

    Blocks for two seconds at most, whatever answers there, but for the lookup of a host's name.
    """
    target = directory.metrics_target()
    if not target:
        return None
    deadline_s = time.monotonic() + _TIMEOUT_S
    try:
        where = parse_target(target)
        text = _read_file(where) if isinstance(where, str) else _read_address(*where, deadline_s)
        return LiveCounters(target, "", _values(text, deadline_s))
    except (OSError, ValueError, ConfigError, http.client.HTTPException) as error:
        return LiveCounters(target, _words(error), {})


def _words(error: Exception) -> str:
    """One line, whatever the server's answer that is quoted in it."""
    words = str(error)[:_MOST_WORDS] or type(error).__name__
    return "".join(each if each.isprintable() else "?" for each in words)


def _values(text: str, deadline_s: float) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Raises ValueError for what is not in the format, TimeoutError."""

    def lines() -> Iterator[str]:
        for line in io.StringIO(text):
            _left_s(deadline_s)
            if len(line) > _MOST_LINE:
                raise ValueError(f"a longer line than an engine exports: characters={len(line)}")
            yield line

    try:
        return {
            (sample.name.removeprefix(PREFIX).removesuffix("_total"), _sorted(sample.labels)): (
                sample.value
            )
            for family in text_fd_to_metric_families(lines())  # type: ignore[arg-type]
            for sample in family.samples
            if sample.name.startswith(PREFIX)
        }
    except (LookupError, AttributeError, TypeError) as error:  # what its parser stumbles over
        raise ValueError(f"not in Prometheus' text format: {error}") from error


def _left_s(deadline_s: float) -> float:
    """Seconds left, above 0; raises TimeoutError if there are none."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"it took longer than {_TIMEOUT_S:g} s")
    return left_s


def _read_file(path: str) -> str:
    data = read_regular(path, _MOST_BYTES + 1)
    _check_length(len(data))
    return data.decode("utf-8")


def _check_length(num_bytes: int) -> None:
    if num_bytes > _MOST_BYTES:
        raise ValueError(f"more than an engine exports: bytes={num_bytes}")


def _read_address(host: str, port: int, deadline_s: float) -> str:
    """What a GET of /metrics brings.

    The client libraries' time limits are those of a single read, so that a server which sends a
    byte now and then is waited for without end. Here all of the answer is read first.
    """
    # An engine that listens on every interface is asked on this machine's own.
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    with _connected(reachable, port, deadline_s) as connection:
        # Of version 1.0, after which a server closes the connection.
        connection.settimeout(_left_s(deadline_s))
        connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = _Received(_all_of(connection, deadline_s))
    response = http.client.HTTPResponse(answer)  # type: ignore[arg-type]
    response.begin()
    if response.status != http.client.OK:
        raise OSError(f"the answer is {response.status} {response.reason}")
    return response.read().decode("utf-8")


def _connected(host: str, port: int, deadline_s: float) -> socket.socket:
    """Connects to whichever of a host's addresses answers; raises OSError."""
    failed: OSError = OSError(f"no address: host={host}")
    for family, kind, number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection: socket.socket | None = None
        try:
            connection = socket.socket(family, kind, number)  # where IPv6 is off this fails
            connection.settimeout(_left_s(deadline_s))
            connection.connect(address)
        except OSError as error:
            if connection is not None:
                connection.close()
            failed = error
        else:
            return connection
    raise failed


def _all_of(connection: socket.socket, deadline_s: float) -> bytes:
    """All that comes until the other end closes; raises OSError, ValueError if it is too much."""
    data = bytearray()
    while True:
        connection.settimeout(_left_s(deadline_s))
        piece = connection.recv(_PIECE_BYTES)
        if not piece:
            return bytes(data)
        data += piece
        _check_length(len(data))


class _Received:
    """An answer that was read already, as the parser of answers wants it: like a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        """The answer as a file."""
        return io.BytesIO(self._data)


def _sorted(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))
