"""Object stores on loopback for tests: real servers, each with one bucket."""

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepwell.errors import StepwellError
from stepwell.tiers.media.objects import open_medium
from stepwell.tiers.media.urls import MediumUrl

from .servers import READY_S, Server, answers_on, free_port

KEY_ID = "stepwell"
SECRET = "s3cret-of-the-tests"


@dataclass
class Objects:
    """A server, not started yet.

    Attributes:
        scheme: of its URLs.
        port: that it listens on.
        path: of its endpoint.
        make_bucket: makes the bucket, once it runs.
    """

    server: Server
    scheme: str
    port: int
    make_bucket: Callable[[], None]
    path: str = ""

    def url(self, prefix: str) -> str:
        """Of a prefix in its bucket."""
        return f"{self.scheme}://pool/{prefix}?endpoint=http://127.0.0.1:{self.port}{self.path}"


def _ask(method: str, url: str, body: bytes = b"", kind: str = "") -> None:
    headers = {"Content-Type": kind} if kind else {}
    request = urllib.request.Request(url, body or None, headers, method=method)
    with urllib.request.urlopen(request, timeout=30):
        pass


def moto(folder: Path, port: int = 0) -> Objects:
    """S3, in memory; believes every signature."""
    port = port or free_port()
    command = ["moto_server", "-H", "127.0.0.1", "-p", str(port)]
    ready = answers_on(port, b"GET /moto-api/ HTTP/1.0\r\n\r\n", b"HTTP/1.")
    server = Server(command, ready, folder / "moto.log")
    return Objects(server, "s3", port, lambda: _ask("PUT", f"http://127.0.0.1:{port}/pool"))


def rclone(folder: Path) -> Objects:
    """S3 over a directory; checks signatures, and writes over what is there whatever it is told."""
    port = free_port()
    root = folder / "root"
    root.mkdir()
    command = ["rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}",
               "--auth-key", f"{KEY_ID},{SECRET}", "--config", "", str(root)]  # fmt: skip
    server = Server(command, answers_on(port), folder / "rclone.log")
    return Objects(server, "s3", port, (root / "pool").mkdir)


def weed(folder: Path) -> Objects:
    """S3 on SeaweedFS: checks signatures and rights; "reader" may not write."""
    data, config = folder / "data", folder / "identities.json"
    data.mkdir()
    config.write_text(json.dumps({"identities": [
        {"name": "admin", "actions": ["Admin", "Read", "List", "Write"],
         "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}]},
        {"name": "reader", "actions": ["Read:pool", "List:pool"],
         "credentials": [{"accessKey": "reader", "secretKey": SECRET}]},
    ]}))  # fmt: skip
    # All that it would listen on, and nothing told to anybody.
    ports = {name: free_port() for name in (
        "s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port",
        "volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc",
    )}  # fmt: skip
    command = ["weed", "mini", "-dir", str(data), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1",
               "-bucket", "pool", "-s3.config", str(config), "-s3.autoCreateBucket=false",
               "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false",
               "-master.telemetry=false", *(f"-{name}={port}" for name, port in ports.items()),
               ]  # fmt: skip
    port = ports["s3.port"]
    server = Server(command, answers_on(port), folder / "weed.log")
    objects = Objects(server, "s3", port, lambda: _wait_for_bucket(objects.url("wait")))
    return objects


def _wait_for_bucket(url: str) -> None:
    """It makes it itself, some time after it has begun to answer."""
    give_up_s = time.monotonic() + READY_S
    while True:
        medium = open_medium(MediumUrl.parse(url), 10.0)
        try:
            medium.check()
            return
        except StepwellError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.1)
        finally:
            medium.close()
