"""What holds for all tests of media: what they leave behind, and the patience of a busy machine."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from stepwell.tiers.media import movers, pool

_kept: list[Any] = []


@pytest.fixture(autouse=True)
def _clients_of_dead_masters() -> Iterator[None]:
    """Keep them apart: no process sees as many masters die as this one."""
    yield
    module = sys.modules.get("stepwell.tiers.media.mooncake_left")
    for client in () if module is None else module.left():
        _kept.append(client)
        module.take_back(client)


@pytest.fixture(autouse=True)
def _time_for_what_has_to_go_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a grant, or tries a library, does so for as long as its call may take."""
    monkeypatch.setattr(pool, "_WAIT_FOR_GRANT_S", 60.0)
    monkeypatch.setattr(movers, "_CHECK_WITHIN_S", 60.0)
