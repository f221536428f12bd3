"""Compare products of few rows with packed weights and the attention of single tokens in bf16 (draftsmith/target/kernels.py) with PyTorch's own: `python -m scripts.bench.decoder.products --output FILE`.

Both ways take turns on every shape; each time is the first quartile of the repeats, as a busy machine only ever adds to one. Writes one
JSON file with milliseconds and ratios.
"""

import shlex
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from draftsmith.machine import environment_json
from draftsmith.storage import write_json

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
SHAPES = (
    (192, 64), (256, 256), (576, 192), (256, 704), (576, 576), (576, 1536), (1536, 576), (256, 6144), (2048, 2048), (576, 49152)
)  # fmt: skip
"""(inputs, outputs) of matrices of small targets: projections, feed-forward layers, output projections."""
ATTENTION = tuple((batch, context) for batch in (1, 8, 64) for context in (128, 512, 1024))
"""(rows, tokens before) of a target with 9 heads of 64, three of which share keys."""
_FLOPS = 1.2e9


def main() -> None:
    """Measure and write the file that the command line names."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    found = [measure(n, m, rows) for n, m in tqdm(SHAPES, unit="shape") for rows in ROWS]
    attention = [measure_attention(rows, context) for rows, context in tqdm(ATTENTION, unit="context")]
    command = shlex.join(["python", "-m", "scripts.bench.decoder.products", *sys.argv[1:]])
    write_json(output, {"command": command, **environment_json(), "products": found, "attention": attention})


@torch.no_grad()
def measure(inputs: int, outputs: int, rows: int) -> dict[str, float]:
    """Return the times of one product, and how many times as fast packed weights are."""
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
    plain, fast = _in_turns(
        lambda: F.linear(x, weight),
        lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
        max(12, min(300, int(_FLOPS / (2 * rows * inputs * outputs)))),
    )
    shape = {"inputs": inputs, "outputs": outputs, "rows": rows}
    return {**shape, "plain_ms": round(plain, 4), "packed_ms": round(fast, 4), "ratio": round(plain / fast, 2)}


@torch.no_grad()
def measure_attention(rows: int, context: int) -> dict[str, float]:
    """Return the times of the attention of one bf16 token in each row, and how many times as fast it is with the queries of shared
    keys as rows of one head."""
    query, mask = torch.randn(rows, 9, 1, 64).bfloat16(), torch.ones(rows, 1, 1, context, dtype=torch.bool)
    key, value = torch.randn(2, rows, 3, context, 64).bfloat16()
    plain, fast = _in_turns(
        lambda: F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True),
        lambda: F.scaled_dot_product_attention(query.view(rows, 3, 3, 64), key, value, mask),
        30,
    )
    return {
        "rows": rows,
        "context": context,
        "plain_ms": round(plain, 3),
        "folded_ms": round(fast, 3),
        "ratio": round(plain / fast, 2),
    }


def _in_turns(plain: Callable[[], object], fast: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the first quartiles of milliseconds."""
    times: list[list[float]] = [[], []]
    for repeat in range(repeats):
        for way in (0, 1) if repeat % 2 else (1, 0):
            started = time.perf_counter()
            (plain, fast)[way]()
            times[way].append(1000 * (time.perf_counter() - started))
    return sorted(times[0])[repeats // 4], sorted(times[1])[repeats // 4]


if __name__ == "__main__":
    main()
