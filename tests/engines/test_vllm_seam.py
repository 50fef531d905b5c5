"""What goes wrong between vLLM and the store stays there: a counted miss, never a hang or an end.

A load that could not be begun was offered again at the next step, for ever; results that had
been polled were lost when a later step of the same call failed, and their rows stayed pinned.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.engines.harness import BLOCK_TOKENS, EngineProcess, prompt, transfer_config

pytestmark = pytest.mark.engine

Reference = Callable[[Sequence[int]], list[int]]


def test_any_call_of_the_store_may_fail(
    model: Path, engine: EngineProcess, reference: Reference, tmp_path: Path
) -> None:
    one, other = prompt(0, 1000), prompt(1, 1000)
    engine.start(model, transfer_config(tmp_path / "kv"))
    engine.answers([one])
    engine.call("forget")
    for name in ("read", "write", "lookup", "poll", "touch", "acquire", "use_root"):
        for times in (1, 1000):
            engine.call("break_store", name=name, times=times)
            answers = engine.answers([one, other], together=True)
            assert answers == [reference(one), reference(other)], (name, times)
            engine.call("break_store", name=name, times=0)
            engine.call("forget")
    assert engine.count("internal_errors") > 0
    answer = engine.call("generate", prompts=[one])[0]
    assert answer["ids"] == reference(one)
    assert answer["cached"] == 7 * BLOCK_TOKENS, "nothing is left broken"
    assert engine.count("lookups", answer="miss", reason="internal") > 0
