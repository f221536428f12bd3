"""DFlash2 heads for engines: schemas, reading, layouts, and how such heads are recognised.

The layout is the one of the published heads, flat, with an explicit `is_causal`: without it engines take a window for causal.
"""

from pathlib import Path

from draftsmith.heads.block import formats as block
from draftsmith.heads.dflash2.head import DFlash2Head
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.recognise import Format
from draftsmith.heads.formats.schema import ABSENT
from draftsmith.target.target import Target

_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SCALES = ("output_multiplier", "final_logit_softcapping")


def load_dflash2_directory(path: Path | str, target: Target) -> DFlash2Head:
    """Return the head in a directory of the DFlash2 layout, ours or another's, fp32, on the target's device.

    Raises UserError as `load_dflash_directory` does, and for layers some of which see a window and some all.
    """
    path = Path(path)
    config = block.read_block_config(path, target, *_SIZES, *_SCALES, "swa_window_size", sliding=True)
    scales = [config.get(key) for key in _SCALES]
    if scales[0] not in (None, target.head.scale) or (scales[1] or None) not in (None, target.head.softcap):
        raise block.not_computed(path, "another scale or softcap of its logits than the target's")
    window = [] if config["sliding_window"] is None else ["sliding_window"]
    sizes = block.read_sizes(path, config, "DFlash2", *_SIZES, *window)
    return block.load_block(path, config, target, DFlash2Head, **sizes)


_CONVOLUTIONS = [f"layers.{{m}}.{part}_conv" for part in ("attention", "mlp")]
_SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
DFLASH2 = block.block_schema(
    "dflash2",
    "DFlash2DraftModel",
    tensors=(
        *(f"{conv}.{name}" for conv in _CONVOLUTIONS for name in ("base_kernel", "kernel_projection.weight")),
        *(f"candidate_selector.{name}" for name in _SELECTOR),
    ),
    keys={
        "is_causal": False,  # engines would take a window for causal
        "layer_types": lambda export: (
            ["full_attention" if export.head.window is None else "sliding_attention"] * export.head.options.num_layers
        ),
        # Else Qwen3's configuration drops the window.
        "use_sliding_window": lambda export: export.head.window is not None,
        "sliding_window": lambda export: export.head.window or ABSENT,
    },
    section={
        **block.option_keys(*_SIZES),
        # Engines draft with the bare matrix of the target's output projection, and these.
        "output_multiplier": lambda export: export.target.head.scale if export.target.head.scale != 1.0 else ABSENT,
        "final_logit_softcapping": lambda export: export.target.head.softcap or ABSENT,
    },
)

_OWN_VOCABULARY = block.whole_vocabulary("DFlash2", "takes its candidates for tokens of the target")
_BIAS = block.biased_projection("DFlash2")
_NARROW = Rule(
    "more candidates (head.selector_top_k) than the target is wide for: k (k + 1) is above its width",
    "keeps the scores of all pairs in a state of that width",
    "train with a smaller head.selector_top_k, or export the layout dflash2 for vLLM",
    lambda files, target, head: head.options.selector_top_k * (head.options.selector_top_k + 1) > target.hidden_size,
)
_LENGTH = (
    "Convolutions and attention see the block that is served, one slot longer than the draft: tau of K tokens is that of K in the report, "
    "where each has a pass of its own."
)

_VLLM = Served(
    engines.start_vllm("dflash", one_length=True),
    rules=(_OWN_VOCABULARY, _BIAS),
    caveats=(
        _LENGTH,
        "vLLM 0.32 has DFlash2 in its runner for GPUs alone, which is the default there: leave "
        "`VLLM_USE_V2_MODEL_RUNNER` unset.",
        "By default vLLM drafts the most likely tokens at every temperature; with "
        '`"draft_sample_method": "probabilistic"` it draws them, as draftsmith does.',
    ),
    needs="states",
    since="0.28",
)
_SGLANG = Served(
    engines.start_sglang("DFLASH"),
    rules=(
        _OWN_VOCABULARY,
        _BIAS,
        block.no_embeddings("DFlash2"),
        block.own_embeddings("DFlash2", "serve it with vLLM, which keeps them"),
    ),
    caveats=(
        _LENGTH,
        "SGLang runs DFlash2 on GPUs alone. The root counts: a block of B slots is B draft tokens, of which B - 1 are drafted. Above "
        "temperature 0 it draws them over the candidates, as draftsmith does. It must be of August 2026 or later, as earlier ones take a "
        "window for causal whatever `is_causal` says.",
    ),
    needs="blocks",
)
_LLAMA_CPP = block.served_by_llama_cpp(
    "dflash2",
    "DFlash2",
    rules=(_OWN_VOCABULARY, _NARROW),
    caveats=(
        "It drafts the most likely tokens at every temperature. `--spec-draft-p-min` ends a draft before the first token with "
        "a smaller share of its candidates' scores.",
    ),
    kind="dflash",
    shorter=_LENGTH,
    ends=_BIAS,
)
_FOR_LLAMA_CPP = block.for_llama_cpp(DFLASH2, block.LM_HEAD, block.D2T)

LAYOUTS = (
    Layout("dflash2", DFLASH2, load_dflash2_directory, {"vllm": _VLLM, "sglang": _SGLANG}),
    Layout("dflash2", _FOR_LLAMA_CPP, load_dflash2_directory, {"llama_cpp": _LLAMA_CPP}),
)

FORMATS = (
    Format(
        "a DFlash2 head",
        3,
        lambda f: "dflash2" in f.words or "selector_rank" in str(f.config.get(block.SECTION)),
        load_dflash2_directory,
    ),
)
