"""What engines lack of DFlash and DSpark heads, and what to watch for when they are started on one: see engines.py."""

from draftsmith.heads.contracts import ModelFiles
from draftsmith.heads.engine_rule import Rule, Watch
from draftsmith.heads.target import Target


def _own_vocabulary(files: ModelFiles, _: Target) -> bool:
    return files.config["draft_vocab_size"] != files.config["vocab_size"]


def _scaled_rope(files: ModelFiles, _: Target) -> bool:
    """llama.cpp's converter of block drafters writes these kinds alone."""
    return files.config["rope_parameters"]["rope_type"] not in ("default", "linear", "yarn")


def _biased(_: ModelFiles, target: Target) -> bool:
    """A scale or a softcap leaves the most likely token what it is, which is all that vLLM takes of DFlash's logits unless it
    is told to sample its drafts."""
    return target.head.bias is not None


def _more_than_a_matrix(_: ModelFiles, target: Target) -> bool:
    own = target.head
    return own.bias is not None or own.scale != 1.0 or own.softcap is not None


_TITLES = {"dflash": "DFlash", "dspark": "DSpark"}
_MEASURE = "train it with draftsmith train and export.layout null, and measure it with draftsmith evaluate"

BLOCK_RULES: tuple[Rule, ...] = (
    Rule("llama_cpp", ("dflash_llama_cpp",), "a draft vocabulary of its own", "has no converter for it", "export the layout dflash for "
         "vLLM, or train with the whole vocabulary", _own_vocabulary),
    *(Rule("llama_cpp", (f"{method}_llama_cpp",), f"a target with another RoPE scaling than linear or YaRN, for {title}", "leaves "
           "the scaling out where it converts this draft, in silence", f"export the layout {method} for vLLM", _scaled_rope)
      for method, title in _TITLES.items()),
    Rule("vllm", ("dflash",), "a target whose output projection has a bias, for DFlash", "takes the bare matrix for the drafts",
         _MEASURE, _biased),
    *(Rule(engine, (layout,), f"a target whose output projection has a bias, a scale or a softcap, for {title}", "takes the bare "
           "matrix for the drafts", _MEASURE, _more_than_a_matrix)
      for engine, layout, title in (("llama_cpp", "dflash_llama_cpp", "DFlash"), ("vllm", "dspark", "DSpark"),
                                    ("llama_cpp", "dspark_llama_cpp", "DSpark"))),
)  # fmt: skip

BLOCK_WATCH: tuple[Watch, ...] = (
    Watch("vllm", ("dflash", "dspark"), "The number of tokens is that of the trained block: with another, vLLM fills in a block "
          "of another length, which accepts less."),
    Watch("vllm", ("dflash",), "On CPUs vLLM 0.32 normalises the keys of the text with the first layer's weights in all layers "
          "(its `rms_norm` knows one row of weights there), so drafts of several layers are accepted less."),
    Watch("vllm", ("dspark",), "vLLM 0.32 has DSpark in its runner for GPUs alone, which is the default there: leave "
          "`VLLM_USE_V2_MODEL_RUNNER` unset."),
    Watch("vllm", ("dspark",), "vLLM 0.32 knows no temperatures of the confidences: `enable_adaptive_verification` (off by "
          "default) ranks drafts by the raw ones, not by those of evaluate.drafts."),
    Watch("llama_cpp", ("dflash_llama_cpp", "dspark_llama_cpp"), "Without `--spec-type` it does not speculate, and says nothing. "
          "With fewer tokens than the trained block has it fills in a shorter one, which accepts less."),
    Watch("llama_cpp", ("dspark_llama_cpp",), "`--spec-draft-p-min` ends a draft before the first slot whose own confidence is "
          "lower. It knows no temperatures, and no product over slots: its thresholds are not those of evaluate.drafts."),
)  # fmt: skip
