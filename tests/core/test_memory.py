"""Memory for transfers: aligned, zeroed, safe across a fork, in huge pages if there are any."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stepwell.bench.procs import huge_page_bytes
from stepwell.core import memory
from stepwell.core.memory import aligned_memory

MIB = 1 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def address_of(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 3 * MIB + 5])
@pytest.mark.parametrize("huge", [True, False])
def test_it_is_aligned_zeroed_and_writable(size_bytes: int, huge: bool) -> None:
    view = aligned_memory(size_bytes, huge=huge)
    assert len(view) == size_bytes
    assert view.format == "B"
    assert address_of(view) % 4096 == 0
    assert view == bytes(size_bytes)
    view[-1] = 7
    assert view[-1] == 7


@pytest.mark.parametrize("size_bytes", [0, -1])
def test_no_size(size_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"size_bytes={size_bytes}"):
        aligned_memory(size_bytes)


def test_a_child_gets_zeros_and_the_parent_keeps_its_pages() -> None:
    """They would be copy-on-write else, and a read in flight could end in the child's copy."""
    # In a process of its own: a fork of this one would take other tests' threads for gone.
    program = """
import os
from stepwell.core.memory import aligned_memory
view = aligned_memory(4 << 20)
view[:] = b"x" * len(view)
child = os.fork()
if child == 0:
    os._exit(0 if view == bytes(len(view)) else 1)
assert os.waitpid(child, 0)[1] == 0
assert view == b"x" * len(view)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_huge_pages_are_asked_for_and_counted() -> None:
    """Sizes of a huge page and more; the smaller half of a mapping may not be aligned to one."""
    if not SETTING.exists() or "[never]" in SETTING.read_text():
        assert huge_page_bytes(aligned_memory(16 * MIB)) == 0
        return
    view, other = aligned_memory(64 * MIB), aligned_memory(64 * MIB, huge=False)
    assert huge_page_bytes(view) == 0  # nothing is there yet
    for each in (view, other):
        each[:] = b"x" * len(each)
    assert huge_page_bytes(other) == 0
    found_bytes = huge_page_bytes(view)
    assert 0 < found_bytes <= 64 * MIB
    assert huge_page_bytes(view[: 8 * MIB]) <= found_bytes / 4


def test_a_kernel_that_knows_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_WIPEONFORK", 4711)
    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", 4712)
    view = aligned_memory(4 * MIB)
    view[0] = 1
    assert len(view) == 4 * MIB
