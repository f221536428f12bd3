"""EAGLE-3 heads for engines: the layouts, what each engine lacks of them, and how such heads are recognised.

Schemas and reading are shared with P-EAGLE: heads/eagle/formats.py.
"""

from dataclasses import replace
from pathlib import Path

from draftsmith.heads.eagle.formats import AUX_LAYERS, EAGLE3, EAGLE3_SPECULATORS, read_either, read_fused
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import Eagle3Head
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served, changed_embedding, has_flag, served_by_speculators
from draftsmith.heads.formats.llama_cpp import LLAMA_CPP_SILENT, llama_cpp_yarn, start_llama_cpp
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.formats.schema import ModelFiles, Schema, flatten
from draftsmith.target.target import Target


def load_eagle3_directory(path: Path | str, target: Target, names: Schema = EAGLE3) -> Eagle3Head:
    """Return the head in an EAGLE-3 directory, flat or of speculators, ours or another's, fp32, on the target's device.

    Reads safetensors and EAGLE's own pickles, the layer's tensors under `midlayer.` or `layers.0.`; a missing embedding
    is the target's. What config.json leaves out is what engines take for it: layers (2, n//2, n-3), no switch on, and
    the defaults of a Llama configuration.

    Args:
        path: The directory.
        target: That the head drafts for.
        names: The schema with the names of the tensors, where a layout has others.

    Raises:
        UserError: Something is missing or misshapen, the head is of another target's sizes, or engines read its layers differently.
    """
    config = read_either(Path(path), "eagle3", "EAGLE-3")
    return read_fused(Path(path), config, target, Eagle3Head, Eagle3Options, names)


def _layers(files: ModelFiles) -> list[int]:
    return files.config[AUX_LAYERS]


def _one_layer(why: str) -> Rule:
    return Rule(
        "head.num_hidden_layers above 1",
        why,
        "serve it with vLLM, or train with head.num_hidden_layers 1",
        lambda files, target, head: flatten(files.config)["num_hidden_layers"] > 1,
    )


_WINDOW = Rule(
    "head.sliding_window",
    "lets the draft see all tokens, in silence",
    "serve it with vLLM, or train without it",
    lambda files, target, head: "sliding_window" in flatten(files.config),
)


def _other_engines(one_layer: str, single_layer: str) -> tuple[Rule, ...]:
    """What SGLang and TensorRT-LLM lack of the flat layout. one_layer: what they do with several decoder layers; single_layer:
    with one layer of the target."""
    return (
        _one_layer(one_layer),
        _WINDOW,
        Rule(
            "head.norm_before_residual",
            "ignores it in silence and adds the raw state",
            "serve it with vLLM, or train without it",
            has_flag("norm_before_residual"),
        ),
        Rule(
            "layer 0 among head.layer_ids",
            "counts layer outputs, and the embeddings are none",
            "serve it with vLLM, or train with other layers",
            lambda files, target, head: 0 in _layers(files),
        ),
        Rule(
            "a single layer in head.layer_ids",
            single_layer,
            "serve it with vLLM, or train with three layers",
            lambda files, target, head: len(_layers(files)) == 1,
        ),
        Rule(
            "input embeddings that were trained",
            "takes the target's in silence",
            "serve it with vLLM, or train with head.train_embeddings false",
            changed_embedding,
        ),
    )


_OTHER_LAYOUT = "export the layout eagle3 for vLLM, SGLang and TensorRT-LLM, or train without it"

_VLLM = Served(
    engines.start_vllm("eagle3"),
    caveats=(
        engines.name_the_method("eagle3"),
        "Leave `parallel_drafting` out: it asks for a head that was trained for it, which this is not.",
        engines.VLLM_SAME_GPUS,
    ),
    needs="states",
)
_SGLANG = Served(
    engines.start_sglang("EAGLE3"),
    rules=_other_engines(
        "calls the first norm of a later layer by another name, so that it stays untrained, in silence",
        "leaves out `fc`, which it applies to wider states alone",
    ),
    caveats=("The algorithm must be EAGLE3. With EAGLE it accepts nothing, and says nothing.", engines.SGLANG_ROOT),
    needs="states",
)
_TENSORRT_LLM = Served(
    engines.start_tensorrt_llm("Eagle3"),
    rules=_other_engines("knows one draft layer", "builds no `fc` for one"),
    caveats=(
        "It counts layer outputs, so its layers are one lower than those of the recipe. Older releases: "
        "`decoding_type: Eagle` and `speculative_model_dir`.",
    ),
    needs="states",
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
        _one_layer("knows one draft layer"),
        _WINDOW,
        Rule(
            "a target with the RoPE scaling longrope",
            "leaves its factors out, in silence",
            "export the layout eagle3 for vLLM",
            lambda files, target, head: head.config.rope_parameters["rope_type"] == "longrope",
        ),
        llama_cpp_yarn("EAGLE-3", "export the layout eagle3 for vLLM"),
    ),
    caveats=(LLAMA_CPP_SILENT,),
    needs="states",
)

LAYOUTS = (
    Layout("eagle3", EAGLE3, load_eagle3_directory, {"vllm": _VLLM, "sglang": _SGLANG, "tensorrt_llm": _TENSORRT_LLM}),
    Layout("eagle3", replace(EAGLE3, name="eagle3_llama_cpp"), load_eagle3_directory, {"llama_cpp": _LLAMA_CPP}),
    Layout(
        "eagle3",
        EAGLE3_SPECULATORS,
        load_eagle3_directory,
        {
            "vllm": Served(engines.start_vllm_speculators, caveats=(engines.SPECULATORS_NUMBERS,), needs="states"),
            "speculators": served_by_speculators("head.hidden_size other than the target's"),
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
        load_eagle3_directory,
    ),
    Format("an EAGLE-3 head", 10, _is_eagle3, load_eagle3_directory),
)
