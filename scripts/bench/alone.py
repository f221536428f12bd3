"""Time whole calls of `draftsmith.decode` with the target alone beside transformers' `generate`, in turns, on one thread:
python -m scripts.bench.alone --target T --output docs/results/decoder/alone.json

What a call takes holds the reading of the prompt. `generate` runs twice: on the model that draftsmith loaded, whose norms, attention and
products are faster already, and on one that transformers opened by itself.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import draftsmith
from draftsmith.decoder.answers import Request
from scripts.bench.commands import facts_of, keep

OURS, SAME, THEIRS = "draftsmith.decode", "generate, the same model", "generate, transformers' own model"


def ways(path: str, dtype: str, prompt: list[int], new_tokens: int) -> dict[str, Callable[[], list[int]]]:
    """Return what answers the prompt, by name."""
    target = draftsmith.load_target(path, dtype=dtype)
    request = Request("prompt", "", tuple(prompt), new_tokens, ignore_eos=True)
    theirs = AutoModelForCausalLM.from_pretrained(target.directory, dtype=target.dtype)

    def generate(model: Any) -> list[int]:
        ids = torch.tensor([prompt])
        limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "eos_token_id": [], "pad_token_id": 0}
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits)
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    return {
        OURS: lambda: draftsmith.decode(target, None, [request])[0].output_ids,
        SAME: lambda: generate(target.model),
        THEIRS: lambda: generate(theirs),
    }


def measure(calls: dict[str, Callable[[], list[int]]], repeats: int) -> dict[str, Any]:
    """Return each way's seconds and ours against them: medians of the repeats, paired."""
    texts = {name: call() for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            wall, own = time.perf_counter(), time.process_time()
            call()
            seconds[name].append(time.perf_counter() - wall)
            cpu[name].append(time.process_time() - own)

    def told(name: str) -> dict[str, Any]:
        ratios = sorted(theirs / ours for theirs, ours in zip(cpu[name], cpu[OURS], strict=True))
        return {
            "seconds": median(seconds[name]),
            "cpu_seconds": median(cpu[name]),
            "least_cpu_seconds": min(cpu[name]),
            "times_ours": median(ratios),
            "from_to": [ratios[0], ratios[-1]],
            "same_text": texts[name] == texts[OURS],
        }

    return {name: told(name) for name in calls}


def main(argv: list[str]) -> int:
    """Run the bench; return 0."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.alone", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--prompt_tokens", type=int, default=46)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    own = parser.parse_args(argv)
    torch.set_num_threads(1)
    prompt = torch.randint(100, 10_000, (own.prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    result = facts_of("alone", argv)
    for dtype in ("float32", "bfloat16"):
        result[dtype] = measure(ways(own.target, dtype, prompt, own.new_tokens), own.repeats)
    return keep(own.output, result)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
