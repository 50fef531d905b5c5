"""The stores that the demo's engines write and read: a folder, or storage that engines share."""

import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Protocol

from stepwell.bench import storefiles
from stepwell.bench.prometheus import parse_metrics, total
from stepwell.bench.server import HOST, free_port
from stepwell.core.identity import Identity
from stepwell.errors import ConfigError, StepwellError, TierError
from stepwell.tiers.media.kinds import kind_of, open_medium
from stepwell.tiers.media.roots import described_roots, erase_root
from stepwell.tiers.media.urls import MediumUrl

__all__ = ["FolderStore", "SharedStore", "Store", "fs_tier_config"]

_PASSWORD_NAME = "STEPWELL_DEMO_PASSWORD"
_QUIET_S = 3.0  # a slow server takes a while for one chunk
_REST_WITHIN_S = 120.0
_POLL_S = 0.1
_WITHIN_S = 30.0


class Store(Protocol):
    """What the demo does with a store besides naming it to an engine.

    Attributes:
        tier: whose tokens Stepwell accounts for; "" where it is not Stepwell's.
        env: variables that an engine needs for it.
    """

    tier: str
    env: Mapping[str, str]

    def rest(self) -> bool:
        """Wait until nothing is written any more; False if that takes too long."""
        ...

    def written_bytes(self) -> int:
        """What was written so far, by the engine that runs now."""
        ...

    def cool(self) -> None:
        """Drop from memory what can be dropped."""
        ...


class FolderStore:
    """Files below a folder. See `Store`."""

    def __init__(self, folder: Path, tier: str) -> None:
        self.tier = tier
        self.env: Mapping[str, str] = {}
        self._folder = folder
        folder.mkdir()

    def rest(self) -> bool:
        """See `Store.rest`."""
        return storefiles.wait_until_stable(self._folder, timeout_s=_REST_WITHIN_S)

    def written_bytes(self) -> int:
        """See `Store.written_bytes`."""
        return sum(size for size, _ in storefiles.snapshot(self._folder).values())

    def cool(self) -> None:
        """See `Store.cool`."""
        storefiles.drop_page_cache(self._folder)


class SharedStore:
    """Storage behind a URL, watched by what Stepwell exports from the engine. See `Store`.

    Args:
        url: as a person wrote it.

    Attributes:
        url: the same for an engine's configuration, without a password.
        env: variables of the engine, for what the url lacks.

    Raises:
        ConfigError: it is wrong.
    """

    def __init__(self, url: str) -> None:
        self._url = MediumUrl.parse(url)
        self.env: Mapping[str, str]
        self.url, self.env = _without_password(url, self._url)
        self.tier = kind_of(self._url).name
        self._port = free_port()
        # Stands for the weights, so that the chunks are this run's alone and can be erased.
        self._weights_id = f"stepwell-demo-{secrets.token_hex(8)}"

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return self._url.shown

    @property
    def settings(self) -> dict[str, object]:
        """Of Stepwell, for engines on this store."""
        return {"weights_id": self._weights_id, "metrics": f"{HOST}:{self._port}"}

    def rest(self) -> bool:
        """See `Store.rest`."""
        give_up_s = time.monotonic() + _REST_WITHIN_S
        last, since_s = self.written_bytes(), time.monotonic()
        while time.monotonic() - since_s < _QUIET_S:
            if time.monotonic() > give_up_s:
                return False
            time.sleep(_POLL_S)
            now = self.written_bytes()
            if now != last:
                last, since_s = now, time.monotonic()
        return True

    def written_bytes(self) -> int:
        """See `Store.written_bytes`."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{HOST}:{self._port}/metrics", timeout=_WITHIN_S) as response:
                metrics = parse_metrics(response.read().decode())
        except (OSError, urllib.error.URLError) as error:
            raise TierError(f"the engine exports no counters: error={error}") from error
        return round(total(metrics, "stepwell_write_bytes_total", {"tier": self.tier}))

    def cool(self) -> None:
        """See `Store.cool`: whether the server reads from its memory is its own affair."""

    def erase(self) -> str:
        """Remove what was written; returns what is left and why, in words, "" for nothing."""
        try:
            with closing(open_medium(self._url, _WITHIN_S)) as medium:
                roots = described_roots(medium)
                if roots is None:
                    return (
                        f"{self.shown} cannot list what it holds: the demo's chunks are left to "
                        "its own eviction."
                    )
                ours = [root for root, identity in roots.items() if self._is_ours(identity)]
                for root in ours:
                    erase_root(medium, root)
        except (StepwellError, OSError) as error:
            return f"The demo's chunks are left on {self.shown}: {error}"
        return "" if ours else f"Nothing of the demo's was found on {self.shown}."

    def _is_ours(self, identity: Identity | None) -> bool:
        return identity is not None and identity.fields.get("weights") == self._weights_id


def fs_tier_config(config: Mapping[str, object], root: Path) -> dict[str, object]:
    """vLLM's own connector and file-system tier, through the same CPU spec and primary."""
    extra = config["kv_connector_extra_config"]
    if not isinstance(extra, Mapping):
        raise ConfigError("the connector configuration has no extra configuration")
    shared = ("spec_name", "spec_module_path", "cpu_bytes_to_use")
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": config["kv_role"],
        "kv_load_failure_policy": config["kv_load_failure_policy"],
        "kv_connector_extra_config": {
            **{key: extra[key] for key in shared},
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        },
    }


def _without_password(text: str, url: MediumUrl) -> tuple[str, dict[str, str]]:
    """An engine's command line is seen by all users of the machine, and its log is kept."""
    if not url.password or url.secret() != url.password:
        return text, {}
    scheme, _, rest = text.partition("://")
    before, _, after = rest.rpartition("@")
    user = before.partition(":")[0]
    return f"{scheme}://{user}:${{{_PASSWORD_NAME}}}@{after}", {_PASSWORD_NAME: url.password}
