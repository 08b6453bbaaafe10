"""One engine in a process of its own: reads a request as JSON from the standard input, writes what came out to a file.

{"model": DIR, "engine": {options of vllm.LLM}, "prompts": [[token, ...], ...], "max_tokens": 8, "repeats": 2}
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def inspect_worker(worker: Any) -> dict[str, Any]:
    """What one worker holds: its rank, the digests of its banks, and the bytes of all parameters and buffers."""
    from blake3 import blake3

    model = worker.model_runner.model
    banks: dict[str, str] = {}
    layers = [module for module in model.modules() if type(module).__name__ == "RoutedExperts"]
    for layer in layers:
        for name, parameter in layer.named_parameters(recurse=False):
            banks[f"{layer.layer_name}.{name}"] = blake3(parameter.numpy(force=True).tobytes()).hexdigest()
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return {"rank": worker.rank, "banks": banks, "bytes": sum(tensors.values()), "status": _status()}


def _status() -> dict[str, int]:
    with open("/proc/self/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS")}


def main(out: str) -> None:
    request = json.load(sys.stdin)
    result = attempt(request["attempts"]) if "attempts" in request else answer(request)
    with open(out, "w", encoding="utf-8") as file:
        json.dump(result, file)


def attempt(attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """Each engine's error, or None where one started."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    errors: list[str | None] = []
    for one in attempts:
        try:
            LLM(one["model"], **one["engine"])
            errors.append(None)
        except Exception as exc:  # noqa: BLE001 - whatever stops it is what is asked for
            errors.append(f"{type(exc).__name__}: {exc}")
        cleanup_dist_env_and_memory()
    return {"errors": errors}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What one engine holds and says."""
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(request["model"], **request["engine"])
    result: dict[str, Any] = {"seconds": time.perf_counter() - start}
    result["workers"] = llm.collective_rpc(inspect_worker)
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], logprobs=1)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    result["repeats"] = []
    for _ in range(request["repeats"]):
        answers = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
        result["repeats"].append(
            [
                {
                    "tokens": list(a.token_ids),
                    "finish_reason": a.finish_reason,
                    "stop_reason": a.stop_reason,
                    "logprobs": [step[t].logprob for step, t in zip(a.logprobs, a.token_ids, strict=True)],
                }
                for a in answers
            ]
        )
    return result


if __name__ == "__main__":
    main(sys.argv[1])
