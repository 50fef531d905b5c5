"""A process that runs vLLM engines one after another, told what to do over a socket.

Each message is one line of JSON, ``{"do": ..., ...}``; each answer ``{"ok": ...}`` or
``{"error": ...}``. Real engines, real weights (random), real files; only the process's lifetime is
in the hands of the test.
"""

import json
import logging
import socket
import sys
import threading
import time
from typing import Any


class Driver:
    """Holds at most one engine."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.timings: dict[str, list[float]] = {}
        self.requirements: Any = None
        self.read_run: Any = None
        self.released = threading.Event()

    def start(self, model: str, transfer: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
        """Start an engine; ``options`` go to vllm.LLM."""
        from vllm import LLM

        defaults = {
            "dtype": "float32",
            "max_model_len": 4096,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "seed": 0,
            "disable_log_stats": False,
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 64 << 20,
        }
        began_s = time.monotonic()
        self.llm = LLM(model=model, kv_transfer_config=transfer, **{**defaults, **options})
        return {"start_s": time.monotonic() - began_s}

    def rely_on(self, method: str | None) -> None:
        """Make the contract ask for a method that no vLLM has, or (None) take that back."""
        from stepwell.engines import vllm_contract
        from stepwell.engines.contract import Names

        if self.requirements is None:
            self.requirements = vllm_contract.REQUIREMENTS
        vllm_contract.REQUIREMENTS = self.requirements
        if method is not None:
            extra = Names("v1/kv_offload/tiering/base.py", "SecondaryTierManager", (method,))
            vllm_contract.REQUIREMENTS += (extra,)

    def lose_tiering(self) -> None:
        """Make this vLLM one without tiered offloading: its modules cannot be imported."""
        sys.modules["vllm.v1.kv_offload.tiering.base"] = None  # type: ignore[assignment]

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, together: bool = False
    ) -> list[dict[str, Any]]:
        """Greedy answers, one request after another or all at once."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        answers = []
        for batch in batches:
            inputs = [{"prompt_token_ids": prompt} for prompt in batch]
            for output in self.llm.generate(inputs, params, use_tqdm=False):
                answers.append(
                    {
                        "ids": list(output.outputs[0].token_ids),
                        "finish": output.outputs[0].finish_reason,
                        "cached": output.num_cached_tokens,
                    }
                )
        return answers

    def cancel(self, prompts: list[list[int]], steps: int) -> int:
        """Begin requests, cancel them after some steps, run the engine dry; returns steps made."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        names = [f"cancelled-{time.monotonic_ns()}-{idx}" for idx in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        made = steps
        while engine.has_unfinished_requests():
            engine.step()
            made += 1
        return made

    def forget(self) -> bool:
        """Empty the device's prefix cache and vLLM's primary, so that only Stepwell has chunks."""
        self.drain()
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def drain(self) -> None:
        """Step the idle engine until every chunk is where it is going (in-process engines)."""
        core = self._core()
        give_up_s = time.monotonic() + 60
        while core.scheduler.has_requests() and time.monotonic() < give_up_s:
            core.step_fn()

    def counters(self) -> dict[str, int]:
        """Every counter of the store as ``name{label=value,...}``."""
        return {
            f"{name}{{{','.join(f'{k}={v}' for k, v in labels.items())}}}": value
            for name, labels, value in self._tier().store.context.metrics
        }

    def prometheus(self) -> dict[str, float]:
        """vLLM's own metrics, as its /metrics would show them."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "value"):
                labels = {
                    k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")
                }
                name = f"{metric.name}{{{','.join(f'{k}={v}' for k, v in sorted(labels.items()))}}}"
                found[name] = metric.value
        return found

    def time_calls(self) -> None:
        """From now on note how long the calls on the scheduler thread take."""
        tier = self._tier()
        for name in ("lookup", "submit_store", "submit_load", "get_finished_jobs", "get_stats"):
            self.timings[name] = []
            setattr(tier, name, self._timed(getattr(tier, name), self.timings[name]))

    def break_store(self, name: str, times: int) -> None:
        """Make the next calls of a method of the store raise."""
        store = self._tier().store
        real = getattr(type(store), name).__get__(store)
        left = [times]

        def broken(*args: Any, **kwargs: Any) -> Any:
            if left[0] > 0:
                left[0] -= 1
                raise RuntimeError(f"{name} was broken by the test")
            return real(*args, **kwargs)

        setattr(store, name, broken)

    def slow_reads(self, seconds: float) -> None:
        """From now on every read of the drive takes so much longer; below 0: until told else."""
        from stepwell.tiers import blockio

        if self.read_run is None:
            self.read_run = blockio.read_run
        self.released.set()  # those that wait go on
        self.released = threading.Event()
        released, real = self.released, self.read_run

        def slow(*args: Any) -> Any:
            released.wait(None if seconds < 0 else seconds)
            return real(*args)

        blockio.read_run = slow if seconds else real

    def timings_s(self) -> dict[str, list[float]]:
        """What `time_calls` noted, in seconds."""
        return self.timings

    def preemptions(self) -> float:
        """How often the scheduler took a running request's blocks away."""
        found = self.prometheus()
        return sum(v for k, v in found.items() if k.startswith("vllm:num_preemptions"))

    def stop(self) -> None:
        """Shut the engine down in an orderly way."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        if self.read_run is not None:
            self.slow_reads(0)
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        # Also after a start that failed: vLLM's worker keeps its connector in a global, and the
        # next engine in this process would copy into the failed one's memory.
        ensure_kv_transfer_shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()

    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def _tier(self) -> Any:
        connector = self._core().scheduler.connector
        return connector.connector_scheduler.manager.secondary_tiers[0]

    @staticmethod
    def _timed(call: Any, seconds: list[float]) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - began_s)

        return timed


def main() -> None:
    """Serve one connection until it closes."""
    logging.getLogger().setLevel(logging.WARNING)
    connection = socket.socket(fileno=int(sys.argv[1]))
    driver = Driver()
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            message = json.loads(line)
            do = message.pop("do")
            try:
                answer: dict[str, Any] = {"ok": getattr(driver, do)(**message)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
                if do == "start":
                    driver.stop()
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    driver.stop()


if __name__ == "__main__":
    main()
