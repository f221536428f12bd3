"""The contracts of the Medusa layouts: the original one, that of TGI and that of vLLM (up to 0.32).

Symbols in shapes: H target hidden, V target vocab, heads, layers (blocks per head), projections (output projections
in the file). The first two layouts name neither sizes nor dtype: their readers take them from the target.
"""

from draftsmith.heads.contracts import Config, Contract, KeyRule, ModelFiles, TensorRule, broken, check_torch_dtype


def _sizes(config: Config) -> dict[str, int]:
    return {"heads": config["medusa_num_heads"], "layers": config["medusa_num_layers"]}


def _vllm_sizes(config: Config) -> dict[str, int]:
    heads = config["num_heads"]
    return {
        "H": config["hidden_size"],
        "V": config["vocab_size"],
        "heads": heads,
        "layers": config["num_hidden_layers"],
        "projections": 1 if config["original_lm_head"] else heads,
    }


def _check_one_block_beside_the_shared_projection(contract: Contract, files: ModelFiles) -> None:
    layers = files.config["medusa_num_layers"]
    if files.sizes["projections"] == 0 and layers != 1:
        why = "TGI stops at more where the heads use the target's projection"
        raise broken(contract, "config key medusa_num_layers", f"1 ({why})", repr(layers))


_TENSORS = (
    TensorRule("{i}.{j}.linear.weight", ("H", "H")),
    TensorRule("{i}.{j}.linear.bias", ("H",)),
    # All or none: TGI uses the target's projection for every head, in silence, where a single one is missing.
    TensorRule("{p}.{layers}.weight", ("V", "H")),
)
_RANGES = {"i": "heads", "j": "layers", "p": "projections"}
_HEADS = KeyRule("medusa_num_heads", int, "the heads; those that the file lacks stay random in silence")
_BASE = KeyRule("base_model_name_or_path", str, "the target, which the reader loads from there")

# The layout of FasterDecoding/Medusa, with safetensors for its pickle; TensorRT-LLM converts it too. For vLLM it is
# not enough: nothing there says that heads share the target's projection, and vLLM would leave theirs random.
MEDUSA = Contract(
    name="medusa",
    tensors=_TENSORS,
    keys=(
        _HEADS,
        KeyRule(
            "medusa_num_layers",
            int,
            "the original code makes all blocks of a head one module, so that only the last would count, in silence",
            1,
        ),
        _BASE,
        KeyRule("medusa_fc_bias", bool, "a reader that does not find it drops the blocks' biases in silence", True),
    ),
    sizes=_sizes,
    ranges=_RANGES,
    forbidden={"architectures": "readers find the layout by its absence"},
)

MEDUSA_TGI = Contract(
    name="medusa_tgi",
    tensors=_TENSORS,
    keys=(_HEADS, KeyRule("medusa_num_layers", int, "the blocks of each head"), _BASE),
    sizes=_sizes,
    ranges=_RANGES,
    forbidden={"architectures": "TGI would take it for another speculator, load none and fail at the first request"},
    checks=(_check_one_block_beside_the_shared_projection,),
    closed="TGI reads three keys",
)

MEDUSA_VLLM = Contract(
    name="medusa_vllm",
    tensors=(
        TensorRule("blocks.{i}.layers.{j}.weight", ("H", "H")),
        TensorRule("blocks.{i}.layers.{j}.bias", ("H",)),
        # vLLM leaves a missing one random in silence. The shared one is a copy: it does not ask the target for it.
        TensorRule("lm_heads.{p}.weight", ("V", "H")),
    ),
    keys=(
        KeyRule("model_type", str, "how vLLM finds the configuration class", "medusa"),
        KeyRule("architectures", list, "how vLLM finds the model class", ["MedusaModel"]),
        KeyRule("hidden_size", int, "H; vLLM assumes 4096"),
        KeyRule("vocab_size", int, "V; vLLM assumes 32001"),
        KeyRule("num_heads", int, "the heads; vLLM assumes 5, and uses as many as the tokens it drafts"),
        KeyRule("num_hidden_layers", int, "the blocks of each head; vLLM assumes 1"),
        KeyRule("medusa_fc_bias", bool, "vLLM drops the blocks' biases in silence without it", True),
        KeyRule("original_lm_head", bool, "one projection for all heads; vLLM assumes one for each"),
        KeyRule("logit_scale", float, "vLLM multiplies the logits by it"),
        KeyRule("torch_dtype", str, "the dtype of every tensor"),
    ),
    sizes=_vllm_sizes,
    ranges=_RANGES,
    checks=(check_torch_dtype,),
    closed="vLLM takes any key with num and heads, or num and layers, in its name for one of its own",
)
