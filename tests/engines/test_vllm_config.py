"""Bad configuration: one clear line at start-up, and nothing half-started."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepwell.engines.vllm_args import kv_transfer_config
from tests.engines.harness import EngineError, EngineProcess, prompt, transfer_config

pytestmark = pytest.mark.engine

Tier = dict[str, Any]
Reference = Callable[[Sequence[int]], list[int]]


def bad(name: str, value: object) -> Callable[[Tier, Path], None]:
    return lambda tier, tmp_path: tier.update({name: value})


def path_is_a_file(tier: Tier, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    tier["path"] = str(tmp_path / "file")


def path_holds_other_things(tier: Tier, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter-1").write_text("mine")
    tier["path"] = str(tmp_path / "thesis")


def path_cannot_be_written(tier: Tier, tmp_path: Path) -> None:
    tier["path"] = "/proc/stepwell"


CASES: list[tuple[str, Callable[[Tier, Path], None], str]] = [
    ("unknown key", bad("capcity", "1GiB"), 'the nearest is "capacity"'),
    ("a file", path_is_a_file, "is a file"),
    ("other things", path_holds_other_things, "other things"),
    ("not writable", path_cannot_be_written, "cannot be"),
    ("too large", bad("capacity", "9000TiB"), "larger than the file system"),
    ("negative", bad("capacity", "-1GiB"), "negative"),
    ("no unit", bad("capacity", "100"), "unit"),
    ("no unit, a number", bad("capacity", 100), "unit"),
    ("relative", bad("path", "kv"), "absolute"),
    ("fs:///p", bad("path", "fs:///p"), "local directory"),
    ("fs://p", bad("path", "fs://p"), "local directory"),
    ("file://p", bad("path", "file://p"), "three slashes"),
]


def test_every_bad_configuration_is_one_clear_line(
    model: Path, shared_engine: EngineProcess, tmp_path: Path
) -> None:
    for name, spoil, words in CASES:
        transfer = transfer_config(tmp_path / "kv")
        spoil(transfer["kv_connector_extra_config"]["secondary_tiers"][0], tmp_path)
        before = len(shared_engine.log())
        with pytest.raises(EngineError, match=r"ConfigError") as caught:
            shared_engine.start(model, transfer)
        assert words in str(caught.value), name
        assert "\n" not in str(caught.value), name
        assert re.search(r"=\S", str(caught.value)), name
        lines = [line for line in shared_engine.log()[before:].splitlines() if words in line]
        assert any("ERROR" in line and "Stepwell:" in line for line in lines), name
        assert not (tmp_path / "kv").exists(), name
        shared_engine.stop()
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "thesis/chapter-1").read_text() == "mine"

    shared_engine.start(model, transfer_config(tmp_path / "kv"))
    assert len(shared_engine.answers([prompt(0, 50)])) == 1
    shared_engine.stop()


def test_a_store_that_another_engine_uses(
    model: Path, engine: EngineProcess, new_process: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    engine.start(model, transfer_config(tmp_path / "kv"))
    other = new_process()
    with pytest.raises(EngineError, match=f"another process uses.*pid={engine.process.pid}"):
        other.start(model, transfer_config(tmp_path / "kv"))


def test_vllms_own_connector_is_refused_with_what_to_write(
    model: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    transfer = transfer_config(tmp_path / "kv")
    transfer["kv_connector"] = "OffloadingConnector"
    del transfer["kv_connector_module_path"]
    with pytest.raises(EngineError, match='"kv_connector": "StepwellConnector"'):
        engine.start(model, transfer)


def test_the_gpu_form_on_the_cpu_build_is_refused_with_what_to_write(
    model: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="vllm-args --cpu"):
        engine.start(model, kv_transfer_config(str(tmp_path / "kv"), "64MiB"))


def test_two_stepwell_tiers_in_one_engine(
    model: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    transfer = transfer_config(tmp_path / "kv")
    tiers = transfer["kv_connector_extra_config"]["secondary_tiers"]
    tiers.append({**tiers[0], "path": str(tmp_path / "kv-2")})
    engine.start(model, transfer)
    first = engine.answers([prompt(0, 600)])
    engine.call("forget")
    assert engine.answers([prompt(0, 600)]) == first


def test_a_vllm_that_does_not_fit_starts_without_stepwell_only_if_asked_to(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    one = prompt(0, 600)
    engine.call("rely_on", method="promote_at_moonrise")
    try:
        with pytest.raises(EngineError, match=r"expected a name promote_at_moonrise.*vllm=0"):
            engine.start(model, transfer_config(tmp_path / "kv"))
        assert not (tmp_path / "kv").exists()
        before = len(engine.log())
        transfer = transfer_config(tmp_path / "kv", if_incompatible="start_without")
        engine.start(model, transfer)
        assert engine.answers([one]) == [reference(one)]
        assert "starting WITHOUT Stepwell" in engine.log()[before:]
        assert not (tmp_path / "kv").exists()
    finally:
        engine.call("rely_on", method=None)


def test_a_vllm_without_tiering_starts_without_stepwell_only_if_asked_to(
    model: Path, new_process: Callable[..., EngineProcess], reference: Reference, tmp_path: Path
) -> None:
    one = prompt(0, 600)
    process = new_process()
    process.call("lose_tiering")
    transfer = transfer_config(tmp_path / "kv")
    with pytest.raises(EngineError, match=r"tiered offloading.*start_without.*vllm=0"):
        process.start(model, transfer)
    transfer = transfer_config(tmp_path / "kv", if_incompatible="start_without")
    process.start(model, transfer)
    assert process.answers([one]) == [reference(one)]
    assert "starting WITHOUT Stepwell" in process.log()
    assert not (tmp_path / "kv").exists()


def test_a_primary_smaller_than_one_chunk(
    model: Path, engine: EngineProcess, tmp_path: Path
) -> None:
    transfer = transfer_config(tmp_path / "kv")
    transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = 100_000
    with pytest.raises(EngineError, match=r"smaller than one chunk.*chunk=512.0 KiB"):
        engine.start(model, transfer)
