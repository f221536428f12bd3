"""Time passes of a target over more and more tokens on one thread, in turns: with weights as they are, with oneDNN's packed ones, and
rounded to bfloat16, which float16 holds: python -m scripts.bench.passes --target T --output docs/results/decoder/passes.json

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
from draftsmith.errors import UserError
from draftsmith.target import kernels
from scripts.bench.commands import facts_of, keep

CONTEXT = 100
"""The tokens behind which every pass stands."""
TOKENS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 64, 256, 1024)
NONE, ALL = range(0), range(1, sys.maxsize)
WAYS = {"plain": (NONE, NONE), "packed": (ALL, NONE), "half": (ALL, kernels.HALF_ROWS)}
"""The numbers of rows that are multiplied with packed and with float16 weights. draftsmith's own are those of `kernels`."""


@torch.inference_mode()
def measure(models: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Return for each number of tokens the CPU time of a pass each way, the median of the repeats, in milliseconds."""
    vocabulary = next(iter(models.values())).config.vocab_size
    ids = torch.randint(3, vocabulary, (1, CONTEXT + max(TOKENS)), generator=torch.Generator().manual_seed(0))
    caches = {way: DynamicCache() for way in models}
    for way, model in models.items():
        kernels.ROWS, kernels.HALF_ROWS = WAYS[way]
        model(ids[:, :CONTEXT], past_key_values=caches[way])

    def once(way: str, tokens: int) -> float:
        kernels.ROWS, kernels.HALF_ROWS = WAYS[way]
        some, start = ids[:, CONTEXT : CONTEXT + tokens], time.process_time()
        models[way](some, past_key_values=caches[way], logits_to_keep=min(tokens, 64))
        caches[way].crop(-tokens)
        return 1000 * (time.process_time() - start)

    found = []
    for tokens in TOKENS:
        # The first round packs.
        rounds = [{way: once(way, tokens) for way in models} for _ in range(repeats + 1)][1:]
        times = {f"{way}_ms": round(median(r[way] for r in rounds), 2) for way in models}
        found.append({"tokens": tokens} | times)
    made = {copy.__name__ for kept in kernels._packed.values() for copy, it in kept.made.items() if it is not None}
    if len(models) > 1 and made != {"_halves", "_laid_out"}:
        raise UserError(
            "This machine, or its free memory, does not take all kinds of products: there is nothing to compare."
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
    model, rounded = (draftsmith.load_target(own.target, dtype="float32").model for _ in range(2))
    rounded.bfloat16().float()
    facts = facts_of("passes", argv) | {"parameters": model.num_parameters(), "context": CONTEXT}
    return keep(
        own.output, facts | {"passes": measure({"plain": model, "packed": model, "half": rounded}, own.repeats)}
    )


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except UserError as error:
        raise SystemExit(f"passes: {error}") from None
