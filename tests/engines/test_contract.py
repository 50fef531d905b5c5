"""The probe: what Stepwell relies on in vLLM, read from source, never imported."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.engines.vllm_contract import probe, version_of

REPOSITORY = Path(__file__).resolve().parents[2]


def sources() -> dict[str, Path]:
    """The vLLM sources at hand: the installed one and the CUDA release's."""
    found = {}
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.submodule_search_locations:
        found["installed"] = Path(next(iter(spec.submodule_search_locations)))
    cuda = REPOSITORY / ".cache/vllm-0.33.0/vllm"
    if cuda.is_dir():
        found["0.33.0"] = cuda
    return found


SOURCES = sources()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The parts of the installed vLLM that the probe reads, to be changed by the test."""
    if not SOURCES:
        pytest.skip("LEFT OUT: no vLLM source here (scripts/env engine)")
    package = next(iter(SOURCES.values()))
    target = tmp_path / "vllm"
    for folder in ("config", "v1/kv_offload", "v1/core", "v1/metrics", "distributed/kv_transfer"):
        shutil.copytree(package / folder, target / folder)
    return target


@pytest.mark.parametrize("name", ["installed", "0.33.0"])
def test_the_versions_that_the_readme_names_fit(name: str) -> None:
    if name not in SOURCES:
        pytest.skip(f"LEFT OUT: the source of vLLM {name} is not here (scripts/env engine)")
    assert [str(d) for d in probe(SOURCES[name], cpu=True)] == []
    if name != "installed":
        assert version_of(SOURCES[name]).startswith(name)


def edit(old: str, new: str, file: str = "v1/kv_offload/tiering/base.py") -> Callable[[Path], None]:
    def apply(package: Path) -> None:
        text = (package / file).read_text()
        assert old in text
        (package / file).write_text(text.replace(old, new))

    return apply


def remove(folder: str) -> Callable[[Path], None]:
    return lambda package: shutil.rmtree(package / folder)


CHANGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("a method is renamed", edit("def submit_store(", "def enqueue_store("),
     "SecondaryTierManager.submit_store: expected (job_metadata), found no such method"),
    ("a parameter is added",
     edit("def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:",
          "def lookup(self, key, req_context, deadline) -> LookupResult:"),
     "SecondaryTierManager.lookup: expected (key, req_context), "
     "found (key, req_context, deadline)"),
    ("a new abstract method",
     edit("    def take_events(", "    @abstractmethod\n    def must(self): ...\n\n"
          "    def take_events("),
     "SecondaryTierManager.must: expected no such abstract method, found a new one"),
    ("a result's field is gone",
     edit("    successful_keys: Collection[OffloadKey] | None = None\n", ""),
     "JobResult: expected a parameter successful_keys"),
    ("a result's new field is required",
     edit("    job_id: JobId\n    # True if all", "    job_id: JobId\n    epoch: int\n    # True"),
     "JobResult: expected no required parameter epoch"),
    ("the hash seed moved", edit("NONE_HASH", "FIRST_HASH", "v1/core/kv_cache_utils.py"),
     "expected a name NONE_HASH, found none"),
    ("no tiering at all", remove("v1/kv_offload/tiering"),
     "v1/kv_offload/tiering/base.py: expected the file, found none"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_vllm_that_differs_is_told_by_name(
    change: Callable[[Path], None], words: str, copy: Path
) -> None:
    assert probe(copy, cpu=True) == []
    change(copy)
    assert any(words in str(d) for d in probe(copy, cpu=True)), [str(d) for d in probe(copy)]
