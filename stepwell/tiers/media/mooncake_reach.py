"""Whether Mooncake's master answers, asked over plain sockets.

The library keeps the interpreter's lock while it sets a client up or closes one, for as long as it
waits for the master; so it is asked here first, without that lock.
"""

import base64
import http.client
import json
import os
import socket
import time
from collections.abc import Sequence

from stepwell.errors import TierError, in_one_line
from stepwell.tiers.media.urls import shown_address

__all__ = ["Address", "answers", "reachable"]

Address = tuple[str, int]

_MAX_ANSWER_BYTES = 64 << 10


def reachable(addresses: Sequence[Address], ha: bool, timeout_s: float) -> Address:
    """The master's address, once it has answered there as a master does.

    Args:
        addresses: the master's; with ``ha`` etcd's, which knows the master's.
        ha: see above.
        timeout_s: for each of the two questions.

    Raises:
        TierError: nobody answers, or somebody else.
    """
    host, port = _leader(addresses, timeout_s) if ha else addresses[0]
    try:
        answer = _ask(host, port, timeout_s)
    except OSError as error:
        wrong = in_one_line(error)
    else:
        if not answer:  # a master hangs up on what is none of its requests
            return host, port
        wrong = "somebody else is there; a master's address has its --rpc_port"
    raise TierError(
        f"mooncake_master does not answer; is it running there? {shown_address(host, port)} {wrong}"
    )


def answers(addresses: Sequence[Address], ha: bool, timeout_s: float) -> bool:
    """Whether `reachable` finds it."""
    try:
        reachable(addresses, ha, timeout_s)
    except TierError:
        return False
    return True


def _leader(etcds: Sequence[Address], timeout_s: float) -> Address:
    """Whom etcd names; its entry goes a few seconds after the master that wrote it."""
    failures = []
    for host, port in etcds:
        try:
            found = _value(host, port, _leader_key(), timeout_s / len(etcds))
            if found:
                name, _, number = found.rpartition(":")
                return name.strip("[]"), int(number)
            wrong = "it names no master: is mooncake_master running, with --enable_ha=true?"
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            wrong = in_one_line(error)
        failures.append(f"{shown_address(host, port)} {wrong}")
    raise TierError(
        f"etcd does not say where the master is; does it run there? {'; '.join(failures)}"
    )


def _leader_key() -> str:
    """As the library makes it."""
    cluster = os.environ.get("MC_STORE_CLUSTER_ID") or "mooncake_cluster"
    return f"mooncake-store/{cluster.rstrip('/')}/master_view"


def _value(host: str, port: int, key: str, within_s: float) -> str:
    """Of a key, by etcd's JSON gateway (etcd 3.4 and later); "" if there is none."""
    connection = http.client.HTTPConnection(host, port, timeout=within_s)
    try:
        request = json.dumps({"key": base64.b64encode(key.encode()).decode()})
        connection.request("POST", "/v3/kv/range", request, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read(_MAX_ANSWER_BYTES)
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise ValueError(f"no answer from its JSON gateway: status={answer.status}")
    found = json.loads(content).get("kvs")
    return base64.b64decode(found[0]["value"]).decode() if found else ""


def _ask(host: str, port: int, within_s: float) -> bytes:
    """Send what is none of a master's requests, and wait until he says anything, or hangs up.

    Raises:
        OSError: he does neither.
    """
    give_up_s = time.monotonic() + within_s
    with socket.create_connection((host, port), within_s) as connection:
        connection.settimeout(max(0.01, give_up_s - time.monotonic()))
        connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        try:
            return connection.recv(4)
        except ConnectionResetError:
            return b""
