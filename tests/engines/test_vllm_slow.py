"""A drive that hangs or is slow below a real engine: the answers come, and come by computing.

The drive is the real one; only the call that reads from it waits.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.engines.harness import BLOCK_TOKENS, EngineProcess, prompt, transfer_config

pytestmark = pytest.mark.engine

Reference = Callable[[Sequence[int]], list[int]]
STORED = 7 * BLOCK_TOKENS


def test_a_drive_that_hangs(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    """LMCache hung here (its experiments D and F). The request that waits is computed after its
    deadline, those behind it at once, and when the drive is well again it is used again.
    """
    prompts = [prompt(seed, 1000) for seed in range(5)]
    transfer = transfer_config(tmp_path / "kv", read_deadline="2s", slow_after="500ms")
    engine.start(model, transfer)
    engine.answers(prompts)
    engine.call("forget")
    engine.call("time_calls")

    engine.call("slow_reads", seconds=-1)
    began_s = time.monotonic()
    # The second waits for rows that are being filled for the first.
    answers = engine.call("generate", prompts=[prompts[0], prompts[0]], together=True)
    print(f"the first requests took {time.monotonic() - began_s:.1f} s, the deadline included")
    assert [a["ids"] for a in answers] == [reference(prompts[0])] * 2
    # Of those that come next one may be the probe, once per window of the breaker; the others
    # do not wait.
    began_s = time.monotonic()
    answers = engine.call("generate", prompts=prompts[1:5], together=True)
    print(f"the next four took {time.monotonic() - began_s:.1f} s")
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts[1:5]]
    assert [a["cached"] for a in answers] == [0] * 4
    for name, seconds in engine.call("timings_s").items():
        print(f"{name:>18}: longest {max(seconds, default=0) * 1e3:.1f} ms")

    engine.call("slow_reads", seconds=0)  # what hung goes on
    give_up_s = time.monotonic() + 60
    cached = 0
    while not cached and time.monotonic() < give_up_s:
        time.sleep(1)
        engine.call("forget")
        (answer,) = engine.call("generate", prompts=prompts[3:4])
        assert answer["ids"] == reference(prompts[3])
        cached = answer["cached"]
    assert cached == STORED, "a drive that is well again is used again"
    engine.call("drain")
    # vLLM asks for a prompt's chunks up to the first that is missed. The first request was
    # promised all of its chunks; of the others one at most was the probe.
    assert engine.count("missed_tokens", reason="deadline") in (STORED, 2 * STORED)
    assert engine.count("missed_tokens", reason="breaker") >= 3 * BLOCK_TOKENS
    assert engine.count("internal_errors") == 0
    assert engine.count("quarantined_chunks") == 0
    check_tokens(engine)


def test_what_would_be_read_later_than_computed_is_not_read(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    prompts = [prompt(seed, 1000) for seed in range(4)]
    transfer = transfer_config(
        tmp_path / "kv", read_when="faster", read_deadline="2min", slow_after="2min"
    )
    engine.start(model, transfer)
    engine.answers(prompts)
    engine.call("forget")
    engine.call("slow_reads", seconds=20)
    (answer,) = engine.call("generate", prompts=prompts[:1])  # nothing is known of the drive yet
    assert answer["ids"] == reference(prompts[0])
    assert answer["cached"] == STORED
    answers = engine.call("generate", prompts=prompts[1:3])
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts[1:3]]
    assert [a["cached"] for a in answers] == [0, 0]
    engine.call("drain")
    assert engine.count("missed_tokens", reason="not_worth") == 2 * BLOCK_TOKENS
    assert engine.count("internal_errors") == 0
    check_tokens(engine)


def test_a_prefix_below_the_floor_is_computed(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    short, long = prompt(0, 256), prompt(1, 1000)
    engine.start(model, transfer_config(tmp_path / "kv", min_read_tokens=512))
    engine.answers([short, long])
    engine.call("forget")
    answers = engine.call("generate", prompts=[short, long])
    assert [a["ids"] for a in answers] == [reference(short), reference(long)]
    assert [a["cached"] for a in answers] == [0, STORED]
    engine.call("drain")
    assert engine.count("missed_tokens", reason="not_worth") == BLOCK_TOKENS
    check_tokens(engine)


def test_several_drives_are_one_tier(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    """And one that is lost between two runs takes its own chunks along."""
    prompts = [prompt(seed, 1000) for seed in range(3)]
    paths = [str(tmp_path / name) for name in ("a", "b", "c")]
    transfer = transfer_config(tmp_path / "a", host_capacity="8MiB")
    (tier,) = transfer["kv_connector_extra_config"]["secondary_tiers"]
    del tier["path"]
    tier["paths"] = paths
    engine.start(model, transfer)
    # Chunks take turns, the first on the first drive: one prompt by itself lies as we know.
    engine.answers(prompts[:1])
    engine.call("drain")
    engine.answers(prompts[1:])
    engine.call("forget")
    answers = engine.call("generate", prompts=prompts)
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
    assert [a["cached"] for a in answers] == [STORED] * 3
    assert engine.count("served_tokens", tier="host") > 0
    engine.stop()

    for path in (Path(paths[1]) / "extents").iterdir():
        path.unlink()
    engine.start(model, transfer)
    answers = engine.call("generate", prompts=prompts)
    assert [a["ids"] for a in answers] == [reference(p) for p in prompts]
    assert answers[0]["cached"] == BLOCK_TOKENS, "its second chunk lay on the drive that is lost"
    assert engine.count("served_tokens", tier="disk") >= BLOCK_TOKENS
    assert engine.count("quarantined_chunks") == 0
    check_tokens(engine)


def check_tokens(engine: EngineProcess) -> None:
    """Tokens asked = tokens served by each tier + misses by reason."""
    engine.call("drain")
    asked = engine.count("asked_tokens")
    served, missed = engine.count("served_tokens"), engine.count("missed_tokens")
    assert asked == served + missed
    assert asked > 0
