"""EAGLE-3 heads for engines: the layouts, what each engine lacks of them, and how such heads are recognised.

Contracts and conversion are shared with P-EAGLE: heads/eagle/contracts.py and convert.py.
"""

from pathlib import Path

from draftsmith.heads.eagle.contracts import EAGLE3, EAGLE3_LLAMA_CPP, EAGLE3_SPECULATORS, FLAGS
from draftsmith.heads.eagle.convert import read_fused, read_speculators, to_flat_eagle3, to_speculators
from draftsmith.heads.eagle3.head import Eagle3Head
from draftsmith.heads.eagle3.options import Eagle3Options
from draftsmith.heads.files import read_config
from draftsmith.heads.formats.contracts import ModelFiles, flatten
from draftsmith.heads.formats.engine_rules import (
    LLAMA_CPP_SILENT,
    SGLANG_ROOT,
    SPECULATORS_COMPLETE,
    SPECULATORS_NUMBERS,
    VLLM_SAME_GPUS,
    changed_embedding,
    has_flag,
    name_the_method,
    other_width,
)
from draftsmith.heads.formats.layout import Layout, Rule, Served
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.formats.start import (
    start_llama_cpp,
    start_sglang,
    start_speculators,
    start_tensorrt_llm,
    start_vllm,
    start_vllm_speculators,
)
from draftsmith.heads.target.target import Target


def load_eagle3_directory(path: Path | str, target: Target) -> Eagle3Head:
    """Return the head in a flat EAGLE-3 directory, ours or another's, fp32, on the target's device.

    Reads safetensors and EAGLE's own pickles, the layer's tensors under `midlayer.` or `layers.0.`; a missing embedding
    is the target's. What config.json leaves out is what engines take for it: layers (2, n//2, n-3), no switch on, and
    the defaults of a Llama configuration. Raises UserError for anything missing or misshapen, for a head of another
    target's dimensions, and for layers that engines read differently.
    """
    return read_fused(Path(path), read_config(Path(path)), target, Eagle3Head, Eagle3Options, FLAGS)


def load_speculators_directory(path: Path | str, target: Target) -> Eagle3Head:
    """Return the head in an EAGLE-3 directory of the speculators layout; otherwise as `load_eagle3_directory`."""
    config = read_speculators(Path(path), "eagle3", "EAGLE-3")
    return read_fused(Path(path), config, target, Eagle3Head, Eagle3Options, FLAGS)


def _layers(files: ModelFiles) -> list[int]:
    return files.config["eagle_aux_hidden_state_layer_ids"]


def _one_layer(why: str, refused: bool) -> Rule:
    return Rule(
        "head.num_hidden_layers above 1",
        why,
        "serve it with vLLM, or train with head.num_hidden_layers 1",
        lambda files, target, head: flatten(files.config)["num_hidden_layers"] > 1,
        refused,
    )


def _window(refused: bool) -> Rule:
    return Rule(
        "head.sliding_window",
        "lets the draft see all tokens, in silence",
        "serve it with vLLM, or train without it",
        lambda files, target, head: "sliding_window" in flatten(files.config),
        refused,
    )


_NORM_BEFORE_RESIDUAL = Rule(
    "head.norm_before_residual",
    "ignores it in silence and adds the raw state",
    "serve it with vLLM, or train without it",
    has_flag("norm_before_residual"),
    refused=False,
)
_LAYER_0 = Rule(
    "layer 0 among head.layer_ids",
    "counts layer outputs, and the embeddings are none",
    "serve it with vLLM, or train with other layers",
    lambda files, target, head: 0 in _layers(files),
    refused=False,
)
_TRAINED_EMBEDDINGS = Rule(
    "input embeddings that were trained",
    "takes the target's in silence",
    "serve it with vLLM, or train with head.train_embeddings false",
    changed_embedding,
    refused=False,
)


def _single_layer(why: str) -> Rule:
    return Rule(
        "a single layer in head.layer_ids",
        why,
        "serve it with vLLM, or train with three layers",
        lambda files, target, head: len(_layers(files)) == 1,
        refused=False,
    )


_OTHER_LAYOUT = "export the layout eagle3 for vLLM, SGLang and TensorRT-LLM, or train without it"

_VLLM = Served(
    start_vllm("eagle3"),
    rules=(),
    caveats=(
        name_the_method("eagle3"),
        "Leave `parallel_drafting` out: it asks for a head that was trained for it, which this is not.",
        VLLM_SAME_GPUS,
    ),
)
_SGLANG = Served(
    start_sglang("EAGLE3"),
    rules=(
        _one_layer(
            "calls the first norm of a later layer by another name, so that it stays untrained, in silence", False
        ),
        _window(refused=False),
        _NORM_BEFORE_RESIDUAL,
        _LAYER_0,
        _single_layer("leaves out `fc`, which it applies to wider states alone"),
        _TRAINED_EMBEDDINGS,
    ),
    caveats=("The algorithm must be EAGLE3. With EAGLE it accepts nothing, and says nothing.", SGLANG_ROOT),
)
_TENSORRT_LLM = Served(
    start_tensorrt_llm,
    rules=(
        _one_layer("knows one draft layer", False),
        _window(refused=False),
        _NORM_BEFORE_RESIDUAL,
        _LAYER_0,
        _single_layer("builds no `fc` for one"),
        _TRAINED_EMBEDDINGS,
    ),
    caveats=(
        "It counts layer outputs, so its layers are one lower than those of the recipe. Older releases: "
        "`decoding_type: Eagle` and `speculative_model_dir`.",
    ),
)
_LLAMA_CPP = Served(
    start_llama_cpp("draft-eagle3"),
    rules=(
        Rule(
            "head.norm_output",
            "ignores it in silence and feeds back another state",
            _OTHER_LAYOUT,
            has_flag("norm_output"),
        ),
        Rule("head.fc_norm", "has no converter for it", _OTHER_LAYOUT, has_flag("fc_norm")),
        Rule(
            "other than three head.layer_ids",
            "takes exactly three",
            "export the layout eagle3 for vLLM, or train with three",
            lambda files, target, head: len(_layers(files)) != 3,
        ),
        _one_layer("knows one draft layer", True),
        _window(refused=True),
    ),
    caveats=(f"{LLAMA_CPP_SILENT} Qwen2 targets abort.",),
)

LAYOUTS = (
    Layout(
        "eagle3",
        EAGLE3,
        to_flat_eagle3,
        load_eagle3_directory,
        {"vllm": _VLLM, "sglang": _SGLANG, "tensorrt_llm": _TENSORRT_LLM},
    ),
    Layout("eagle3", EAGLE3_LLAMA_CPP, to_flat_eagle3, load_eagle3_directory, {"llama_cpp": _LLAMA_CPP}),
    Layout(
        "eagle3",
        EAGLE3_SPECULATORS,
        to_speculators,
        load_speculators_directory,
        {
            "vllm": Served(start_vllm_speculators, rules=(), caveats=(SPECULATORS_NUMBERS,)),
            "speculators": Served(
                start_speculators,
                rules=(other_width("head.hidden_size other than the target's"),),
                caveats=(SPECULATORS_COMPLETE,),
            ),
        },
    ),
)


def _is_eagle3(folder: HeadFolder) -> bool:
    """`hidden_norm` is in no other head of one layer: published configurations may name neither class nor vocabulary."""
    named = "draft_vocab_size" in folder.config or "eagle3" in folder.words
    return named or any(name.endswith(".hidden_norm.weight") for name in folder.names)


FORMATS = (
    Format(
        "an EAGLE-3 head of speculators",
        1,
        lambda f: f.config.get("speculators_model_type") == "eagle3",
        load_speculators_directory,
    ),
    Format("an EAGLE-3 head", 10, _is_eagle3, load_eagle3_directory),
)
