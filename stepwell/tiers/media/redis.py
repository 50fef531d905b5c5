"""Redis and Valkey: a record is the value of a key; the server evicts and expires by itself."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from stepwell.core.keys import Key, Root, make_key
from stepwell.core.record import HEADER_BYTES
from stepwell.core.types import ChunkResult, Outcome, Reason
from stepwell.errors import ConfigError, TierError, in_one_line
from stepwell.tiers.media.base import Page, Record, Stats, Wanted
from stepwell.tiers.media.bounded import BoundedPool, bounded, within
from stepwell.tiers.media.records import ABSENT, joined, name_of, root_name, split
from stepwell.tiers.media.urls import MediumUrl, shown_address
from stepwell.tiers.outcomes import ALREADY_THERE, DONE, FAILED, NO_ROOM

__all__ = ["RedisMedium", "open_medium"]

logger = logging.getLogger(__name__)

_PARAMETERS = ("cluster", "prefix", "ca_certs", "cert", "key", "verify")
_TLS_FILES = {"ca_certs": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
_SCAN_COUNT = 1000
_MAX_CONNECTIONS = 1024  # more than a tier has threads
_CHECK_MS = 1000
_CHECK_WITHIN_S = 10.0
_ERASE_WITHIN_S = _SCAN_WITHIN_S = 60.0
_MOST_CONNECT_S = 5.0
_NO_RECORD = ChunkResult(Outcome.MISS, Reason.HEADER)
_LOST = (redis.ConnectionError, redis.TimeoutError)
# What a cluster's client raises is no RedisError.
_ERRORS = (RedisError, RedisClusterException, OSError)
# Nor what it raises of a server that is no Redis, and answers what it likes.
_ODD_ERRORS = (*_ERRORS, AttributeError, IndexError, KeyError, TypeError, ValueError)
_NOT_YET = (BusyLoadingError, ClusterDownError, MasterDownError, RedisClusterException)
_REFUSED = (AuthenticationError, AuthorizationError, NoPermissionError)


def open_medium(url: MediumUrl, timeout_s: float) -> "RedisMedium":
    """The server that a URL names; it is not asked yet.

    ``redis://[user[:password]@]host[:6379][/database]``; ``rediss`` for TLS, ``valkey`` for Valkey.
    A password of ``${NAME}`` is taken from that variable of the environment.
    Parameters: ``cluster`` (true for a cluster), ``prefix`` of all keys (stepwell); for TLS the
    files ``ca_certs``, ``cert`` and ``key``, and ``verify`` (false to believe any certificate).

    Args:
        url: see above.
        timeout_s: how long the server may keep silent.

    Raises:
        ConfigError: the URL is wrong.
    """
    url.check_parameters(_PARAMETERS)
    prefix = url.parameters.get("prefix", "stepwell")
    return RedisMedium(_connector(url, timeout_s), prefix, url.shown)


def _connector(url: MediumUrl, timeout_s: float) -> Callable[[], Any]:
    """What makes a client; that of a cluster connects at once."""
    if not url.host:
        raise ConfigError(f"there is no host; write redis://127.0.0.1:6379: url={url.shown}")
    database = url.path.strip("/") or "0"
    if not database.isdecimal():
        raise ConfigError(
            f"the path is the number of a database, and a prefix is given as ?prefix=: "
            f"url={url.shown}"
        )
    options: dict[str, Any] = {
        "host": url.host,
        "port": url.port or 6379,
        "username": url.user or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, _MOST_CONNECT_S),
        "max_connections": _MAX_CONNECTIONS,
        "protocol": 2,  # which every server speaks
        # Once more for a connection that the server has closed meanwhile; a server that keeps
        # silent is not asked twice, since somebody waits.
        "retry": Retry(NoBackoff(), 1, (redis.ConnectionError,)),
    }
    if url.scheme == "rediss":
        options["ssl"] = True
        options["ssl_cert_reqs"] = "required" if url.switch("verify", default=True) else "none"
        options["ssl_check_hostname"] = url.switch("verify", default=True)
        for name, option in _TLS_FILES.items():
            if name not in url.parameters:
                continue
            if not os.access(url.parameters[name], os.R_OK):
                raise ConfigError(
                    f"{name} is no file that can be read: url={url.shown} "
                    f"{name}={url.parameters[name]!r}"
                )
            options[option] = url.parameters[name]
    elif given := [name for name in (*_TLS_FILES, "verify") if name in url.parameters]:
        raise ConfigError(f"{given[0]} is for TLS, which is rediss://: url={url.shown}")
    if url.switch("cluster"):
        if database != "0":
            raise ConfigError(f"a cluster has no numbered databases: url={url.shown}")
        # Only by a url redis-py takes the pool that it is given; without, no call of a cluster was
        # bounded.
        scheme = "rediss" if options.pop("ssl", False) else "redis"
        at = f"{scheme}://{shown_address(options.pop('host'), options.pop('port'))}"
        return lambda: RedisCluster.from_url(
            at, connection_pool_class=BoundedPool, password=url.secret() or None, **options
        )

    def connect() -> redis.Redis:
        client = redis.Redis(db=int(database), password=url.secret() or None, **options)
        pool = client.connection_pool
        pool.connection_class = bounded(pool.connection_class)
        return client

    return connect


class RedisMedium:
    """Records as values of ``prefix:root:key``, in one server or a cluster.

    See `stepwell.tiers.media.base.Medium`. A value is read whole into memory of redis-py and
    copied from there.

    Args:
        connect: makes a client.
        prefix: of all names.
        shown: the URL without its password, for messages.
    """

    def __init__(self, connect: Callable[[], Any], prefix: str, shown: str) -> None:
        self._shown = shown
        self._connect = connect
        self._prefix = prefix
        self._client: Any = None
        self._lock = threading.Lock()
        self._closed = False

    def check(self) -> None:
        """See `stepwell.tiers.media.base.Medium.check`."""
        name = f"{self._prefix}:check"
        try:
            with within(_CHECK_WITHIN_S):
                client = self._ready()
                client.set(name, b"", px=_CHECK_MS)
                client.unlink(name)
        except OutOfMemoryError:
            return  # it is there, and takes us when it has room
        except _REFUSED as error:
            raise ConfigError(
                f"the server refuses us; give redis://user:password@host, and let the user do "
                f"@read, @write and SCAN on {self._prefix}:*: url={self._shown} "
                f"error={in_one_line(error)}"
            ) from error
        except ReadOnlyError as error:
            raise ConfigError(
                f"the server takes no writes; give the one that this is a copy of: "
                f"url={self._shown} error={in_one_line(error)}"
            ) from error
        except _NOT_YET as error:
            raise self._failure("check", error) from error
        except ResponseError as error:
            raise ConfigError(
                f"the server refuses: url={self._shown} error={in_one_line(error)}"
            ) from error
        except _ODD_ERRORS as error:
            failure = self._failure("check", error)
            if isinstance(error, redis.TimeoutError) and self._shown.startswith("rediss:"):
                raise TierError(f"{failure}; does that port speak TLS?") from error
            raise failure from error

    def exist(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """See `stepwell.tiers.media.base.Medium.exist`."""
        answers = self._pipelined([("EXISTS", name) for name in self._names(keys)], within_s)
        self._raise_if_any(answers)
        return [bool(answer) for answer in answers]

    def read(self, wanted: Sequence[Wanted], within_s: float) -> list[Page | ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.read`."""
        names = self._names([each.key for each in wanted])
        commands: list[tuple[Any, ...]] = []
        for name, each in zip(names, wanted, strict=True):
            # One byte more than there should be, or a value of any length would be taken in.
            commands.append(("GETRANGE", name, 0, HEADER_BYTES + len(each.payload)))
            commands.append(("EXISTS", name))
        answers = self._pipelined(commands, within_s)
        self._log_errors(answers)
        values = zip(answers[::2], answers[1::2], wanted, strict=True)
        return [_read(value, exists, each) for value, exists, each in values]

    def write(self, records: Sequence[Record], within_s: float) -> list[ChunkResult]:
        """See `stepwell.tiers.media.base.Medium.write`."""
        names = self._names([record.key for record in records])
        commands: list[tuple[Any, ...]] = []
        for name, record in zip(names, records, strict=True):
            expiry = ("PXAT", max(1, int(record.expires_at_s * 1e3))) if record.expires_at_s else ()
            commands.append(("SET", name, joined(record), "NX", *expiry))
        answers = self._pipelined(commands, within_s)
        self._log_errors(answers)
        return [_written(answer) for answer in answers]

    def remove(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.remove`."""
        commands = [("UNLINK", name) for name in self._names(keys)]
        self._raise_if_any(self._pipelined(commands, within_s))

    def touch(self, keys: Sequence[Key], within_s: float) -> None:
        """See `stepwell.tiers.media.base.Medium.touch`."""
        commands = [("TOUCH", name) for name in self._names(keys)]
        self._raise_if_any(self._pipelined(commands, within_s))

    def erase(self, root: Root) -> int:
        """See `stepwell.tiers.media.base.Medium.erase`."""
        count = 0
        names: list[bytes] = []
        for name in self._scan(root):
            names.append(name)
            if len(names) == _SCAN_COUNT:
                count += self._unlink(names)
                names.clear()
        return count + self._unlink(names)

    def keys(self, root: Root) -> Iterator[Key]:
        """See `stepwell.tiers.media.base.Medium.keys`; a key may come twice."""
        for name in self._scan(root):
            with contextlib.suppress(ValueError):  # somebody else's
                yield make_key(root, bytes.fromhex(name.rpartition(b":")[2].decode()))

    def _scan(self, root: Root) -> Iterator[bytes]:
        pattern = f"{_escaped(self._prefix)}:{root_name(root)}:*"
        names: Iterator[bytes] | None = None
        while True:
            try:
                with within(_SCAN_WITHIN_S):
                    if names is None:
                        names = self._ready().scan_iter(match=pattern, count=_SCAN_COUNT)
                    some = list(islice(names, _SCAN_COUNT))
            except _ODD_ERRORS as error:
                raise self._failure("scan", error) from error
            if not some:
                return
            yield from some

    def stats(self, within_s: float) -> Stats:
        """See `stepwell.tiers.media.base.Medium.stats`; of the server, whoever uses it."""
        try:
            with within(within_s):
                found = self._ready().info("memory")
            # Of a cluster one answer per node.
            of_nodes = all(isinstance(value, dict) for value in found.values())
            nodes = list(found.values()) if of_nodes else [found]
            limits = [node["maxmemory"] for node in nodes]
            return Stats(
                used_bytes=sum(node["used_memory"] for node in nodes),
                capacity_bytes=sum(limits) if all(limits) else None,
            )
        except NoPermissionError:
            return Stats()  # to read and write nobody has to know
        except _ODD_ERRORS as error:
            raise self._failure("info", error) from error

    def close(self) -> None:
        """See `stepwell.tiers.media.base.Medium.close`."""
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.close()

    def _failure(self, command: str, error: BaseException) -> TierError:
        return TierError(f"redis {command} failed: url={self._shown} error={in_one_line(error)}")

    def _ready(self) -> Any:
        if self._closed:
            raise TierError(f"redis is closed: url={self._shown}")
        return self._client or self._share(self._connect())

    def _share(self, client: Any) -> Any:
        # It was made outside of the lock: a cluster is asked, and others would wait one after
        # the other.
        with self._lock:
            if self._client is None and not self._closed:
                self._client = client
            shared = self._client
        if shared is not client:
            client.close()
        return shared

    def _names(self, keys: Sequence[Key]) -> list[str]:
        return [":".join((self._prefix, *name_of(key))) for key in keys]

    def _unlink(self, names: Sequence[bytes]) -> int:
        answers = self._pipelined([("UNLINK", name) for name in names], _ERASE_WITHIN_S)
        self._raise_if_any(answers)
        return sum(answers)

    def _pipelined(self, commands: Sequence[Sequence[Any]], within_s: float) -> list[Any]:
        """Commands in one go; what failed for one of them is in its place."""
        what = str(commands[0][0]) if commands else "nothing"
        try:
            with within(within_s):
                pipeline = self._ready().pipeline(transaction=False)
                for command in commands:
                    pipeline.execute_command(*command)
                answers: list[Any] = pipeline.execute(raise_on_error=False)
        except _ODD_ERRORS as error:
            raise self._failure(what, error) from error
        for answer in answers:
            if isinstance(answer, _LOST):
                raise self._failure(what, answer) from answer
        return answers

    def _raise_if_any(self, answers: Sequence[Any]) -> None:
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._failure("command", answer) from answer

    def _log_errors(self, answers: Sequence[Any]) -> None:
        """Say what is wrong; each chunk's result says only that something is."""
        for answer in answers:
            expected = isinstance(answer, OutOfMemoryError) or _is_no_record(answer)
            if isinstance(answer, Exception) and not expected:
                logger.warning("redis refused: url=%s error=%s", self._shown, in_one_line(answer))
                return


def _is_no_record(answer: object) -> bool:
    """Whether there is a list or a hash under our name: somebody else's, and in the way."""
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


def _read(value: object, exists: object, wanted: Wanted) -> Page | ChunkResult:
    if isinstance(value, bytes):
        return split(value, wanted.payload) if value or exists else ABSENT
    return _NO_RECORD if _is_no_record(value) else FAILED


def _written(answer: object) -> ChunkResult:
    if isinstance(answer, OutOfMemoryError):
        return NO_ROOM  # maxmemory, and the server's policy evicts nothing
    if isinstance(answer, Exception):
        return FAILED
    return DONE if answer else ALREADY_THERE


def _escaped(prefix: str) -> str:
    """A prefix in a pattern of SCAN."""
    return "".join(f"\\{char}" if char in "*?[]\\^" else char for char in prefix)
