"""The serving engines: one record each.

What an engine does with the files of one layout (start lines, limits, caveats) stands with the layout, in the method's
formats.py; here is what holds for all of them. "run" engines serve trained heads in scripts/test_engines.sh; of "read"
ones only the sources or the manual were read.

How a draft is split over GPUs: vLLM and SGLang build EAGLE drafts in the target's tensor-parallel group. Query heads and the
feed-forward layer are divided, key/value heads divided or repeated, and so are vocabularies, which vLLM pads to a multiple
of 64 and SGLang and TensorRT-LLM to whatever divides. vLLM's `draft_tensor_parallel_size` does not change that (0.32; issue
17499 of vllm-project/vllm). Medusa's blocks are never divided, except where TGI computes them beside the target's projection.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from draftsmith.heads.formats.contracts import Config, ModelFiles, flatten

VLLM_PADDING = 64
_FEWER = "serve on fewer GPUs"

Split = Callable[[ModelFiles, int], Iterator[str]]
"""(files, number of GPUs) -> why the engine cannot split them so and what to do; the text follows the engine's name."""


@dataclass(frozen=True)
class Engine:
    """A program that reads exports. No field has a default, so that a new engine says all of it.

    version: the one that the layouts were checked against. checked: how. counters: where it tells how many drafted tokens
    were accepted. split: what keeps it from dividing a draft over GPUs; None for a program that serves nothing.
    serves_adapters: it drafts for a target with a LoRA adapter; the others start the target alone.
    """

    title: str
    version: str
    checked: Literal["run", "read"]
    counters: str
    split: Split | None
    serves_adapters: bool


def _layer(config: Config, gpus: int) -> Iterator[str]:
    """What of an EAGLE layer cannot be divided, and what to do."""
    heads, groups, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    if heads % gpus:
        yield f"divides its {heads} query heads: {_FEWER}, or train with a multiple of {gpus} in head.num_attention_heads"
    if groups % gpus and gpus % groups:
        yield (
            f"divides or repeats its {groups} key/value heads: {_FEWER}, or train with a divisor or a multiple of {gpus} in "
            "head.num_key_value_heads"
        )
    if width % gpus:
        yield (
            f"divides the {width} units of its feed-forward layer: {_FEWER}, or train with a multiple of {gpus} in "
            "head.intermediate_size"
        )


def _vocabulary(rows: int, gpus: int) -> Iterator[str]:
    padded = -(-rows // VLLM_PADDING) * VLLM_PADDING
    if padded % gpus:
        yield f"pads its {rows} tokens to {padded} and divides them: {_FEWER}, 2, 4 or 8"


def _vllm(files: ModelFiles, gpus: int) -> Iterator[str]:
    config = flatten(files.config)
    if "num_attention_heads" in config:
        yield from _layer(config, gpus)
    for rows in sorted({config["vocab_size"], config.get("draft_vocab_size", config["vocab_size"])}):
        yield from _vocabulary(rows, gpus)


def _divided(files: ModelFiles, gpus: int) -> Iterator[str]:
    if "num_attention_heads" in files.config:
        yield from _layer(files.config, gpus)


def _tgi(files: ModelFiles, gpus: int) -> Iterator[str]:
    if files.sizes["projections"] == 0 and files.sizes["H"] % gpus:
        yield (
            f"divides the {files.sizes['H']} units of its blocks: {_FEWER}, or train with head.original_lm_head false, "
            "whose blocks are repeated on every GPU"
        )


def one_gpu(_: ModelFiles, gpus: int) -> Iterator[str]:
    """The split of a program that runs on one GPU."""
    yield "knows no tensor parallelism: leave export.tensor_parallel at 1"


def _whole_layers(_: ModelFiles, gpus: int) -> Iterator[str]:
    """llama.cpp distributes whole layers, and a draft has one: `-devd` says which GPU takes it."""
    yield from ()


ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "vLLM",
        "0.32.0",
        "run",
        "`vllm:spec_decode_num_drafts` and `vllm:spec_decode_num_accepted_tokens` under /metrics: 1 + accepted / drafts is "
        "tau",
        split=_vllm,
        serves_adapters=True,
    ),
    "sglang": Engine(
        "SGLang", "0.5.23", "read", "`accept len` in its log is tau", split=_divided, serves_adapters=False
    ),
    "tensorrt_llm": Engine(
        "TensorRT-LLM",
        "commit 00679c66c",
        "read",
        "compare tokens per second with and without the draft",
        split=_divided,
        serves_adapters=False,
    ),
    "llama_cpp": Engine(
        "llama.cpp",
        "commit 0c1e57098",
        "run",
        "`draft_n` and `draft_n_accepted` in the `timings` of every answer",
        split=_whole_layers,
        serves_adapters=False,
    ),
    "tgi": Engine(
        "TGI",
        "commit 91560ed93",
        "read",
        "compare tokens per second with and without the heads",
        split=_tgi,
        serves_adapters=False,
    ),
    "medusa_original": Engine(
        "FasterDecoding/Medusa",
        "main",
        "read",
        "its command line shows the text as it grows, several tokens a step",
        split=one_gpu,
        serves_adapters=False,
    ),
    "transformers": Engine(
        "transformers",
        "5.23.0",
        "run",
        "compare tokens per second with and without `assistant_model`",
        split=None,
        serves_adapters=False,
    ),
    "hydra_original": Engine(
        "zankner/Hydra",
        "main",
        "read",
        "its command line shows the text as it grows, several tokens a step",
        split=one_gpu,
        serves_adapters=False,
    ),
    "speculators": Engine(
        "speculators",
        "0.9.0",
        "read",
        "it serves nothing: it trains and evaluates further",
        split=None,
        serves_adapters=False,
    ),
}


def split_obstacle(engine: str, files: ModelFiles, gpus: int) -> str | None:
    """Return why `engine` cannot split these files over that many GPUs and what to do instead, None where it can.

    The text follows the engine's name. Programs that serve nothing split nothing.
    """
    split = ENGINES[engine].split
    return None if gpus == 1 or split is None else next(split(files, gpus), None)
