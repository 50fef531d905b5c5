"""What holds for every test: none fails because the machine is busy, and none is lost unseen."""

import os
from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Reasons that hold also on a machine that has everything.
_EVEN_THEN = ("root may write anywhere", "it loads here", "set STEPWELL_TRACES")

R = TypeVar("R", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that was left out where none should be has failed."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """So has a module."""
    return _judged((yield))


def _judged(report: R) -> R:
    """The same, or a failure where a skip is one: with ``STEPWELL_TESTS=all``."""
    if report.skipped and os.environ.get("STEPWELL_TESTS") == "all":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if reason and not any(words in reason for words in _EVEN_THEN):
            report.outcome = "failed"
            report.longrepr = f"{reason}; and STEPWELL_TESTS=all"
    return report
