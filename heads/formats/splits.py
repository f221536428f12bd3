"""How engines split a draft over GPUs, and what keeps them from it.

vLLM and SGLang build EAGLE drafts in the target's tensor-parallel group. Query heads and the feed-forward layer are divided,
key/value heads divided or repeated, and so are vocabularies, which vLLM pads to a multiple of 64 and SGLang and TensorRT-LLM to
whatever divides. vLLM's `draft_tensor_parallel_size` does not change that (0.32; issue 17499 of vllm-project/vllm). Medusa's blocks
are never divided, except where TGI computes them beside the target's projection.
"""

from collections.abc import Callable, Iterator

from draftsmith.heads.formats.schema import Config, ModelFiles, flatten

Split = Callable[[ModelFiles, int], Iterator[str]]
"""(files, number of GPUs) -> why the engine cannot split them so and what to do; the text follows the engine's name."""
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


def vllm(files: ModelFiles, gpus: int) -> Iterator[str]:
    """The split of vLLM."""
    config = flatten(files.config)
    yield from divided(files, gpus)
    for rows in sorted({config["vocab_size"], config.get("draft_vocab_size", config["vocab_size"])}):
        padded = -(-rows // VLLM_PADDING) * VLLM_PADDING
        if padded % gpus:
            yield f"pads its {rows} tokens to {padded} and divides them: {_FEWER}, 2, 4 or 8"


def divided(files: ModelFiles, gpus: int) -> Iterator[str]:
    """The split of an engine that divides a draft's layers as the target's."""
    config = flatten(files.config)
    if "num_attention_heads" in config:
        yield from _layer(config, gpus)


def tgi(files: ModelFiles, gpus: int) -> Iterator[str]:
    """The split of TGI, of Medusa's blocks."""
    if files.sizes["projections"] == 0 and files.sizes["H"] % gpus:
        yield (
            f"divides the {files.sizes['H']} units of its blocks: {_FEWER}, or train with head.original_lm_head false, "
            "whose blocks are repeated on every GPU"
        )


def one_gpu(_: ModelFiles, gpus: int) -> Iterator[str]:
    """The split of a program that runs on one GPU."""
    yield "knows no tensor parallelism: leave export.tensor_parallel at 1"


def whole_layers(_: ModelFiles, gpus: int) -> Iterator[str]:
    """llama.cpp distributes whole layers, and a draft has one: `-devd` says which GPU takes it."""
    yield from ()
