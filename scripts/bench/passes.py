"""Time passes of a target over more and more tokens with packed weights and without, in turns, on one thread:
python -m scripts.bench.passes --target T --output docs/results/decoder/passes.json

Weights come from memory, as they do while a model writes; one matrix timed alone comes from a cache, and says the opposite.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

import draftsmith
from draftsmith.target import kernels
from scripts.bench.commands import facts_of, keep

CONTEXT = 100
"""The tokens behind which every pass stands."""
TOKENS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 256, 1024)
WAYS = {"plain_ms": range(0), "packed_ms": range(1, sys.maxsize)}
"""The numbers of rows that are multiplied with packed weights; draftsmith's own are `kernels.ROWS`."""


@torch.inference_mode()
def measure(model: Any, repeats: int) -> list[dict[str, Any]]:
    """Return for each number of tokens the CPU time of a pass each way, the median of the repeats, and their ratio from pairs."""
    ids = torch.randint(
        3, model.config.vocab_size, (1, CONTEXT + max(TOKENS)), generator=torch.Generator().manual_seed(0)
    )
    cache, found = DynamicCache(), []
    model(ids[:, :CONTEXT], past_key_values=cache)
    for tokens in TOKENS:
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for repeat in range(repeats + 1):
            for name, kernels.ROWS in WAYS.items():
                start = time.process_time()
                model(ids[:, CONTEXT : CONTEXT + tokens], past_key_values=cache, logits_to_keep=min(tokens, 64))
                if repeat:  # the first packs
                    times[name].append(1000 * (time.process_time() - start))
                cache.crop(CONTEXT)
        ratio = median(packed / plain for plain, packed in zip(*times.values(), strict=True))
        found.append(
            {"tokens": tokens} | {k: round(median(v), 2) for k, v in times.items()} | {"ratio": round(ratio, 3)}
        )
    return found


def main(argv: list[str]) -> int:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.passes", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    own = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = draftsmith.load_target(own.target, dtype="float32")
    facts = facts_of("passes", argv) | {
        "parameters": sum(p.numel() for p in target.model.parameters()),
        "context": CONTEXT,
    }
    return keep(own.output, facts | {"passes": measure(target.model, own.repeats)})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
