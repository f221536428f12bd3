"""Whether an engine can split a draft over several GPUs: what it divides, and what has to be divisible for it.

vLLM and SGLang build EAGLE drafts in the target's tensor-parallel group: query heads and the feed-forward layer are
divided, key/value heads divided or repeated, and so are vocabularies, which vLLM pads to a multiple of 64 and SGLang and
TensorRT-LLM to whatever divides. vLLM's `draft_tensor_parallel_size` does not change that (0.32; issue 17499 of
vllm-project/vllm). Medusa's blocks are never divided, except where TGI computes them beside the target's projection.
"""

from collections.abc import Callable, Iterator

from draftsmith.errors import UserError
from draftsmith.heads.contracts import Config, ModelFiles
from draftsmith.heads.eagle3_layouts import flatten
from draftsmith.heads.engines import ENGINES

VLLM_PADDING = 64
_FEWER = "serve on fewer GPUs"


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


def _one_gpu(_: ModelFiles, gpus: int) -> Iterator[str]:
    yield "knows no tensor parallelism: leave export.tensor_parallel at 1"


# llama.cpp distributes whole layers, and a draft has one: `-devd` says which GPU takes it, and nothing has to be divisible.
_SPLITS: dict[str, Callable[[ModelFiles, int], Iterator[str]]] = {
    "vllm": _vllm,
    "sglang": _divided,
    "tensorrt_llm": _divided,
    "tgi": _tgi,
    "llama_cpp": lambda _files, _gpus: iter(()),
    "medusa_original": _one_gpu,
    "hydra_original": _one_gpu,
}


def split_obstacle(engine: str, files: ModelFiles, gpus: int) -> str | None:
    """Return why `engine` cannot split these files over that many GPUs and what to do instead, None where it can.

    The text follows the engine's name. Programs that serve nothing split nothing.
    """
    if gpus == 1 or engine not in _SPLITS:
        return None
    return next(_SPLITS[engine](files, gpus), None)


def check_split(layout: str, engines: tuple[str, ...], files: ModelFiles, gpus: int) -> None:
    """Raise UserError where none of the layout's engines could split the draft over that many GPUs."""
    obstacles = {engine: split_obstacle(engine, files, gpus) for engine in engines if engine in _SPLITS}
    if obstacles and all(obstacles.values()):
        engine, why = next(iter(obstacles.items()))
        raise UserError(
            f"export.tensor_parallel is {gpus}, but {ENGINES[engine].title} cannot split this head in the layout {layout} "
            f"over {gpus} GPUs, since it {why}."
        )
