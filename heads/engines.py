"""Serving engines as data: which ones, what they cannot compute of a head, and what to watch for when starting them.

"run" engines serve trained heads in scripts/test_engines.sh; of "read" ones, and for the layouts in `READ`, only the
sources or the manual were read. A rule is about a head that a layout's files could hold and an engine would not compute: it
is refused where it is all that the layout is for, and named in the export's README where other engines serve the same files.
Contracts (contracts.py) are about files alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from draftsmith.errors import UserError
from draftsmith.heads.block_engine_rules import BLOCK_RULES, BLOCK_WATCH
from draftsmith.heads.checkpoint import EMBEDDING
from draftsmith.heads.contracts import ModelFiles
from draftsmith.heads.eagle1_contract import FC_BIAS
from draftsmith.heads.eagle3_layouts import flatten
from draftsmith.heads.engine_rule import Rule, Watch
from draftsmith.heads.hydra_layouts import has_different_blocks
from draftsmith.heads.hydra_options import HydraOptions
from draftsmith.heads.layer_config import derive_layer_config
from draftsmith.heads.published import is_the_same
from draftsmith.heads.target import Target


@dataclass(frozen=True)
class Engine:
    """A program that reads exports. version: the one that the layouts were held against. checked: how.

    counters: where it tells how many drafted tokens were accepted.
    """

    title: str
    version: str
    checked: Literal["run", "read"]
    counters: str


ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "vLLM",
        "0.32.0",
        "run",
        "`vllm:spec_decode_num_drafts` and `vllm:spec_decode_num_accepted_tokens` under /metrics: 1 + accepted / drafts is "
        "tau",
    ),
    "sglang": Engine("SGLang", "0.5.23", "read", "`accept len` in its log is tau"),
    "tensorrt_llm": Engine(
        "TensorRT-LLM", "commit 00679c66c", "read", "compare tokens per second with and without the draft"
    ),
    "llama_cpp": Engine(
        "llama.cpp",
        "commit 0c1e57098",
        "run",
        "`draft_n` and `draft_n_accepted` in the `timings` of every answer",
    ),
    "tgi": Engine("TGI", "commit 91560ed93", "read", "compare tokens per second with and without the heads"),
    "medusa_original": Engine(
        "FasterDecoding/Medusa", "main", "read", "its command line shows the text as it grows, several tokens a step"
    ),
    "transformers": Engine(
        "transformers", "5.23.0", "run", "compare tokens per second with and without `assistant_model`"
    ),
    "hydra_original": Engine(
        "zankner/Hydra", "main", "read", "its command line shows the text as it grows, several tokens a step"
    ),
    "speculators": Engine("speculators", "0.9.0", "read", "it serves nothing: it trains and evaluates further"),
}


READ = frozenset({("dspark", "vllm")})
"""Layouts that an engine which is run elsewhere was not run with."""


def was_run(layout: str, engine: str) -> bool:
    """Whether the engine has served heads of that layout."""
    return ENGINES[engine].checked == "run" and (layout, engine) not in READ


def _layers(files: ModelFiles) -> list[int]:
    return files.config["eagle_aux_hidden_state_layer_ids"]


def _flag(name: str) -> Callable[[ModelFiles, Target], bool]:
    return lambda files, _: bool(flatten(files.config).get(name))


def _several_layers(files: ModelFiles, _: Target) -> bool:
    return flatten(files.config)["num_hidden_layers"] > 1


def _window(files: ModelFiles, _: Target) -> bool:
    return "sliding_window" in flatten(files.config)


def _own_width(files: ModelFiles, target: Target) -> bool:
    return flatten(files.config)["hidden_size"] != target.hidden_size


def _other_activation(files: ModelFiles, _: Target) -> bool:
    return files.config["hidden_act"] != "silu"


def _changed_embedding(files: ModelFiles, target: Target) -> bool:
    """Embeddings that were written for completeness, rounded or not, are the target's."""
    return EMBEDDING in files.tensors and not is_the_same(files.tensors[EMBEDDING], target.embedding)


def _biased_target(_: ModelFiles, target: Target) -> bool:
    return target.head.bias is not None


def _shares_projection(files: ModelFiles) -> bool:
    return bool(files.config.get("original_lm_head")) or files.sizes.get("projections") == 0


def _shares_biased_projection(files: ModelFiles, target: Target) -> bool:
    return _shares_projection(files) and target.head.bias is not None


def _other_prefix_sizes(files: ModelFiles, target: Target) -> bool:
    if "ND" not in files.sizes:
        return False
    usual = derive_layer_config(HydraOptions(prefix_attention=True), target)
    queries, groups = (n * usual.head_dim for n in (usual.num_attention_heads, usual.num_key_value_heads))
    return [files.sizes[key] for key in ("I", "ND", "GD")] != [usual.intermediate_size, queries, groups]


def _shares_more_than_a_matrix(files: ModelFiles, target: Target) -> bool:
    own = target.head
    return _shares_projection(files) and (own.bias is not None or own.scale != 1.0 or own.softcap is not None)


_FLAT = ("eagle3",)
_OTHER_EAGLE3 = "export the layout eagle3 for vLLM, SGLang and TensorRT-LLM, or train without it"
_VLLM = "serve it with vLLM, or train without it"
_OWN_EMBEDDINGS = "serve it with vLLM, or train with head.train_embeddings false"
_MEASURE = "measure it with draftsmith evaluate, or train an EAGLE-3 head, which has a projection of its own"
_ONE_LAYER = "serve it with vLLM, or train with head.num_hidden_layers 1"
_ALL_TOKENS = "serve it with vLLM, or train without it"
_OWN_PROJECTION = "train with head.original_lm_head false, or export the layout medusa for the original code"

RULES: tuple[Rule, ...] = (
    *BLOCK_RULES,
    Rule("llama_cpp", ("eagle3_llama_cpp",), "head.norm_output", "ignores it in silence and feeds back another state",
         _OTHER_EAGLE3, _flag("norm_output")),
    Rule("llama_cpp", ("eagle3_llama_cpp",), "head.fc_norm", "has no converter for it", _OTHER_EAGLE3, _flag("fc_norm")),
    Rule("llama_cpp", ("eagle3_llama_cpp",), "other than three head.layer_ids", "takes exactly three",
         "export the layout eagle3 for vLLM, or train with three", lambda files, _: len(_layers(files)) != 3),
    *(Rule(engine, layouts, "head.num_hidden_layers above 1", "knows one draft layer", _ONE_LAYER, _several_layers, refused)
      for engine, layouts, refused in (("llama_cpp", ("eagle3_llama_cpp",), True), ("tensorrt_llm", _FLAT, False))),
    Rule("sglang", _FLAT, "head.num_hidden_layers above 1", "calls the first norm of a later layer by another name, so that it "
         "stays untrained, in silence", _ONE_LAYER, _several_layers, refused=False),
    *(Rule(engine, layouts, "head.sliding_window", "lets the draft see all tokens, in silence", _ALL_TOKENS, _window, refused)
      for engine, layouts, refused in (("llama_cpp", ("eagle3_llama_cpp",), True), ("sglang", _FLAT, False),
                                       ("tensorrt_llm", _FLAT, False))),
    *(Rule("speculators", (layout,), what, "takes the draft to be as wide as the target",
           "serve it with vLLM, or leave head.hidden_size out", _own_width, refused=False)
      for layout, what in (("eagle3_speculators", "head.hidden_size other than the target's"),
                           ("peagle_speculators", "P-EAGLE's head.hidden_size other than the target's"))),
    Rule("vllm", ("peagle_speculators",), "P-EAGLE's head.fc_norm", "leaves it out where it reads this format",
         "export the layout peagle, or train without it", _flag("fc_norm")),
    Rule("sglang", _FLAT, "head.norm_before_residual", "ignores it in silence and adds the raw state", _VLLM,
         _flag("norm_before_residual"), refused=False),
    Rule("tensorrt_llm", _FLAT, "head.norm_before_residual", "ignores it in silence and adds the raw state", _VLLM,
         _flag("norm_before_residual"), refused=False),
    Rule("sglang", _FLAT, "layer 0 among head.layer_ids", "counts layer outputs, and the embeddings are none",
         "serve it with vLLM, or train with other layers", lambda files, _: 0 in _layers(files), refused=False),
    Rule("tensorrt_llm", _FLAT, "layer 0 among head.layer_ids", "counts layer outputs, and the embeddings are none",
         "serve it with vLLM, or train with other layers", lambda files, _: 0 in _layers(files), refused=False),
    Rule("sglang", _FLAT, "a single layer in head.layer_ids", "leaves out `fc`, which it applies to wider states alone",
         "serve it with vLLM, or train with three layers", lambda files, _: len(_layers(files)) == 1, refused=False),
    Rule("tensorrt_llm", _FLAT, "a single layer in head.layer_ids", "builds no `fc` for one",
         "serve it with vLLM, or train with three layers", lambda files, _: len(_layers(files)) == 1, refused=False),
    Rule("sglang", _FLAT, "input embeddings that were trained", "takes the target's in silence", _OWN_EMBEDDINGS,
         _changed_embedding, refused=False),
    Rule("tensorrt_llm", _FLAT, "input embeddings that were trained", "takes the target's in silence", _OWN_EMBEDDINGS,
         _changed_embedding, refused=False),
    Rule("vllm", ("eagle1",), "a bias of `fc`", "drops it in silence",
         "export the layout eagle1_sglang for SGLang, which adds it", lambda files, _: FC_BIAS in files.tensors),
    Rule("sglang", ("eagle1_sglang",), "input embeddings of its own", "takes the target's in silence",
         "export the layout eagle1 for vLLM, which keeps them", _changed_embedding),
    Rule("vllm", ("eagle1",), "a target whose output projection has a bias", "leaves the bias out of the drafts",
         _MEASURE, _biased_target),
    Rule("sglang", ("eagle1_sglang",), "a target whose output projection has a bias", "leaves the bias out of the drafts",
         _MEASURE, _biased_target),
    Rule("vllm", ("eagle1",), "another activation than SiLU", "stops at it", "measure it with draftsmith evaluate",
         _other_activation),
    Rule("sglang", ("eagle1_sglang",), "another activation than SiLU", "stops at it", "measure it with draftsmith evaluate",
         _other_activation),
    Rule("medusa_original", ("medusa",), "head.num_layers above 1", "makes all blocks of a head one module, so that only "
         "the last would count, in silence", "export the layout medusa_vllm for vLLM, or train with head.num_layers 1",
         lambda files, _: files.config["medusa_num_layers"] > 1),
    Rule("tensorrt_llm", ("medusa",), "head.original_lm_head", "looks for a projection of each head in the file",
         "train with head.original_lm_head false", lambda files, _: _shares_projection(files), refused=False),
    Rule("tgi", ("medusa_tgi",), "head.num_layers above 1 and head.original_lm_head", "stops at more than one block beside "
         "the target's projection", "export the layout medusa_vllm for vLLM, or train with head.original_lm_head false",
         lambda files, _: _shares_projection(files) and files.config["medusa_num_layers"] > 1),
    Rule("tgi", ("medusa_tgi",), "head.original_lm_head, for a target whose output projection has a bias",
         "leaves the bias out of the drafts", _OWN_PROJECTION, _shares_biased_projection),
    Rule("vllm", ("medusa_vllm",), "head.original_lm_head, for a target whose output projection has a bias",
         "leaves the bias out of the drafts", _OWN_PROJECTION, _shares_biased_projection),
    Rule("hydra_original", ("hydra",), "head.num_layers above 2 without head.tie_blocks", "makes all blocks of a head after its "
         "first one module, so that only the last would count, in silence", "train with head.tie_blocks true",
         lambda files, _: has_different_blocks(files)),
    Rule("hydra_original", ("hydra",), "a prefix layer of other sizes than the target's layers", "makes it from the target's "
         "configuration and stops at other shapes", "train with the target's sizes", _other_prefix_sizes),
    Rule("hydra_original", ("hydra",), "head.original_lm_head, for a target whose output projection has a bias, a scale or a "
         "softcap", "knows a matrix of each head alone", "train with head.original_lm_head false", _shares_more_than_a_matrix),
)  # fmt: skip

WATCH: tuple[Watch, ...] = (
    *BLOCK_WATCH,
    Watch("vllm", ("draft_model",), "`\"method\": \"draft_model\"` does not settle the method alone: a path of the draft that "
          "holds `eagle-`, `eagle3`, `dflash` or `dspark` wins, so move the folder where there is such a name in its path."),
    Watch("vllm", ("draft_model",), "vLLM drafts greedily at every temperature; `\"draft_sample_method\": \"probabilistic\"` beside "
          "the method draws drafts from the model's law."),
    Watch("sglang", ("draft_model",), "The algorithm is STANDALONE. The root counts: a chain of K tokens is K steps, top-k 1 and "
          "K + 1 draft tokens."),
    Watch("llama_cpp", ("draft_model",), "Without `--spec-type` it does not speculate, and says nothing."),
    Watch("transformers", ("draft_model",), "One prompt at a time. It changes the number of drafted tokens as it goes, unless "
          "`num_assistant_tokens_schedule` is `constant`."),
    Watch("vllm", ("eagle3",), "Name the method. Without `method`, vLLM guesses it from the path of the draft: one that holds "
          "`eagle-` anywhere is taken for EAGLE-1, otherwise one that holds `eagle3` for EAGLE-3, and any other for a "
          "language model of its own. With `\"method\": \"eagle3\"` the path does not matter."),
    Watch("vllm", ("eagle1",), "Name the method. Without `method`, vLLM guesses it from the path of the draft: one that holds "
          "`eagle-` anywhere is taken for EAGLE-1, otherwise one that holds `eagle3` for EAGLE-3, and any other for a "
          "language model of its own. With `\"method\": \"eagle\"` the path does not matter."),
    Watch("vllm", ("medusa_vllm",), "vLLM 0.33 removed Medusa: use 0.32 or older. `\"method\": \"medusa\"` does not settle the "
          "method alone: a path of the draft that holds `eagle-`, `eagle3`, `dflash` or `dspark` wins, so move the folder "
          "where there is such a name in its path."),
    Watch("vllm", ("medusa_vllm",), "vLLM drafts a chain, with at most as many tokens as heads."),
    Watch("vllm", ("eagle3",), "Leave `parallel_drafting` out: it asks for a head that was trained for it, which this is not."),
    Watch("vllm", ("peagle",), "`parallel_drafting` must be true: without it vLLM drafts token by token with the same weights, "
          "says nothing, and accepts little. Name the method too: without it vLLM guesses from the path of the draft."),
    Watch("vllm", ("peagle", "peagle_speculators"), "Leave `VLLM_USE_V2_MODEL_RUNNER` unset: where it is 1, vLLM 0.32 ignores "
          "`parallel_drafting`, and says nothing."),
    Watch("vllm", ("eagle3_speculators", "peagle_speculators"), "The export names the target and the number of tokens; other "
          "numbers need another export, or the flat layout."),
    Watch("vllm", ("eagle1", "eagle3", "medusa_vllm", "peagle"), "vLLM 0.32 runs these drafts on as many GPUs as the target: "
          "`draft_tensor_parallel_size` is accepted, and changes nothing."),
    Watch("sglang", ("eagle3",), "The algorithm must be EAGLE3. With EAGLE it accepts nothing, and says nothing."),
    Watch("sglang", ("eagle1_sglang",), "The algorithm is EAGLE, not EAGLE3."),
    Watch("sglang", ("eagle1_sglang", "eagle3"), "The root counts: a chain of K tokens is K steps, top-k 1 and K + 1 draft "
          "tokens."),
    Watch("tensorrt_llm", ("eagle3",), "It counts layer outputs, so its layers are one lower than those of the recipe. Older "
          "releases: `decoding_type: Eagle` and `speculative_model_dir`."),
    Watch("llama_cpp", ("eagle3_llama_cpp",), "Without `--spec-type` it does not speculate, and says nothing. Qwen2 targets "
          "abort."),
    Watch("tgi", ("medusa_tgi",), "TGI loads the target that the export names."),
    Watch("medusa_original", ("medusa",), "It looks for the target that the export names, and for its heads in a Llama or "
          "Mistral model of its own."),
    Watch("hydra_original", ("hydra",), "It is research code for Llama targets and one text at a time, and it looks for the target "
          "that the export names. No serving engine that draftsmith knows reads Hydra."),
    Watch("hydra_original", ("hydra",), "The weights are a pickle of tensors, since it reads no other file."),
    Watch("speculators", ("eagle3_speculators", "peagle_speculators"), "The package knows `layers.0.` and needs the "
          "embeddings; both are there."),
)  # fmt: skip


def rules_for(layout: str, engine: str | None = None) -> list[Rule]:
    """Return the rules about the files of a layout, of one engine or of all."""
    return [rule for rule in RULES if layout in rule.layouts and engine in (None, rule.engine)]


def watch_for(layout: str, engine: str) -> list[str]:
    """Return what to watch for when starting `engine` on the files of a layout."""
    return [watch.text for watch in WATCH if layout in watch.layouts and watch.engine == engine]


def obstacle(layout: str, engine: str, files: ModelFiles, target: Target) -> Rule | None:
    """Return the rule that keeps `engine` from serving these files, None where it serves them."""
    return next((rule for rule in rules_for(layout, engine) if rule.found(files, target)), None)


def refuse_what_engines_lack(layout: str, files: ModelFiles, target: Target) -> None:
    """Raise UserError, naming the engine, why and what to do instead, where the layout's engine lacks something."""
    for rule in rules_for(layout):
        if rule.refused and rule.found(files, target):
            raise UserError(
                f"The layout {layout} cannot hold this head: it has {rule.what}, and {ENGINES[rule.engine].title} "
                f"{rule.why}; {rule.instead}."
            )
