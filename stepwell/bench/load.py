"""A streaming client: sends sessions to an OpenAI-compatible server and takes the times.

Prompts go as token ids to /v1/completions, greedy, with a fixed number of output tokens.
"""

import asyncio
import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.bench.server import ServerError

_REQUEST_TIMEOUT_S = 1800.0
_MAX_LINE_BYTES = 8 * 1024 * 1024  # the first event repeats the prompt's token ids


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one session.

    Attributes:
        session_idx: which prompt.
        ttft_s: from sending the request to its first token, seconds.
        total_s: from sending the request to its end, seconds.
        token_ids: the output tokens.
    """

    session_idx: int
    ttft_s: float
    total_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All answers of one run, in the order of the prompts, and its wall time in seconds."""

    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


def run_load(
    base_url: str,
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    max_tokens: int,
    on_answer: Callable[[], object] = lambda: None,
) -> LoadResult:
    """Sends every prompt once, `concurrency` at a time, and waits for all answers. Blocks.

    Args:
        base_url: "http://host:port".
        prompts: token ids, one list per session.
        concurrency: requests in flight, at least 1; a new one starts when one has ended.
        max_tokens: output tokens per request; the end-of-text token is ignored.
        on_answer: called after each answer, for a progress bar.

    Raises:
        ServerError: a request failed.
    """
    return asyncio.run(_run(base_url, prompts, concurrency, max_tokens, on_answer))


async def _run(
    base_url: str,
    prompts: Sequence[Sequence[int]],
    concurrency: int,
    max_tokens: int,
    on_answer: Callable[[], object],
) -> LoadResult:
    aiohttp: Any = importlib.import_module("aiohttp")  # comes with vLLM
    todo = iter(enumerate(prompts))
    answers: list[Answer] = []

    async def work(session: Any) -> None:
        for session_idx, prompt in todo:  # shared: each worker takes the next one
            answers.append(await _complete(session, base_url, session_idx, prompt, max_tokens))
            on_answer()

    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=_MAX_LINE_BYTES) as session:
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work(session))
            wall_s = time.perf_counter() - started
    except* (aiohttp.ClientError, ServerError, TimeoutError, ValueError) as errors:
        first = errors.exceptions[0]
        raise ServerError(f"a request failed: error={first!r}") from first
    answers.sort(key=lambda answer: answer.session_idx)
    return LoadResult(tuple(answers), wall_s)


async def _complete(
    session: Any, base_url: str, session_idx: int, prompt: Sequence[int], max_tokens: int
) -> Answer:
    body = {
        "model": "demo",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    token_ids: list[int] = []
    ttft_s = 0.0
    started = time.perf_counter()
    async with session.post(f"{base_url}/v1/completions", json=body) as response:
        if response.status != 200:
            text = (await response.text())[:300]
            raise ServerError(f"the server refused: status={response.status} body={text}")
        async for line in response.content:
            new = parse_event(line)
            if new and not token_ids:
                ttft_s = time.perf_counter() - started
            token_ids += new
    total_s = time.perf_counter() - started
    if len(token_ids) != max_tokens:
        raise ServerError(f"an answer was cut short: tokens={len(token_ids)} asked={max_tokens}")
    return Answer(session_idx, ttft_s, total_s, tuple(token_ids))


def parse_event(line: bytes) -> list[int]:
    """Returns the new token ids in one line of a server-sent event stream, [] if it has none.

    Raises:
        ServerError: the event reports an error.
    """
    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
        return []
    event = json.loads(line[len(b"data: ") :])
    if "error" in event:
        raise ServerError(f"the server reports an error: error={event['error']}")
    return [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
