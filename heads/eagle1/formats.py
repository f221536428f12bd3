"""EAGLE-1 heads for engines: the layouts that vLLM serves as `eagle` and SGLang as `EAGLE`, and heads as EAGLE publishes them.

Both engines read EAGLE's own tensors; they differ in the name of the model class and in biases. vLLM adds none to `fc` and
drops a stored one in silence; SGLang always has one there, which it draws at random where the file holds none. vLLM finds the
biases of query, key and value under `qkv_bias`; SGLang knows only `attention_bias`, which asks for one of the output
projection too. EAGLE's own reader is `eagle/model/{ea_model,cnets1}.py`.

Engines compute the drafts' logits with the target's projection. Its scale and softcap change no rank; a bias does, and
neither adds it, hence the rule below.
"""

from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import EMBEDDING, fill
from draftsmith.heads.eagle1 import Eagle1Options
from draftsmith.heads.eagle1.head import Eagle1Head
from draftsmith.heads.files import explain_config, read_config, read_weights
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Rule, Served, biased_target, changed_embedding
from draftsmith.heads.formats.published import check_sizes, is_the_same, read_layer, tidy
from draftsmith.heads.formats.recognise import Format
from draftsmith.heads.formats.schema import LLAMA_KEYS, Export, Schema, TensorRow, llama_layer
from draftsmith.heads.layers.from_target import fold
from draftsmith.target.target import Target

FC_BIAS, OUTPUT_BIAS = "fc.bias", "layers.0.self_attn.o_proj.bias"
PROJECTION = "lm_head.weight"


class Eagle1Schema(Schema):
    """A layout of EAGLE-1, whose `fc` reads embeddings as the target has them."""

    def head_tensors(self, export: Export) -> dict[str, Tensor]:
        own, head = export.head.state_dict(), export.head
        return {
            **own,
            "fc.weight": fold(own["fc.weight"].detach(), slice(head.config.hidden_size), head.embedding_scale),
        }


class SglangSchema(Eagle1Schema):
    """SGLang's, with zeros for biases that it has and the head has not."""

    def head_tensors(self, export: Export) -> dict[str, Tensor]:
        tensors = super().head_tensors(export)
        nothing = tensors["fc.weight"].new_zeros(export.head.config.hidden_size)
        biases = (FC_BIAS, OUTPUT_BIAS) if export.head.options.qkv_bias else (FC_BIAS,)
        return {**{name: nothing.clone() for name in biases}, **tensors}


def _tensors(biased: str) -> tuple[TensorRow, ...]:
    """The tensors that both engines read; the key `biased` asks for the biases of query, key and value."""
    return (
        TensorRow("fc.weight"),
        *(row for row in llama_layer("layers.0.") if "input_layernorm" not in row.name),  # `fc` reads it as it is
        *(TensorRow(f"layers.0.self_attn.{n}_proj.bias", when=lambda config: config[biased]) for n in "qkv"),
        TensorRow(EMBEDDING, optional=True),
    )


_ACTIVATION = {"hidden_act": attrgetter("head.config.hidden_act")}  # which the rules of both engines ask for

# vLLM makes EagleLlamaForCausalLM of the architecture, has no place for lm_head.weight (it raises) and shares the
# target's embeddings where the file holds none or the same. Neither engine may find the keys `bias` (biases of the
# attention), draft_vocab_size (EAGLE-3's) and, in SGLang, hot_vocab_size.
EAGLE1 = Eagle1Schema(
    name="eagle1",
    tensors=_tensors("qkv_bias"),
    keys={
        "architectures": ["LlamaForCausalLM"],  # vLLM puts Eagle in front of it
        **LLAMA_KEYS,
        **_ACTIVATION,
        # attention_bias would add a bias to the output projection, too.
        "qkv_bias": attrgetter("head.options.qkv_bias"),
        "logit_scale": lambda export: float(export.target.head.scale),  # of the drafts' logits, as of the target's own
    },
)

# SGLang binds the target's embeddings and projection whatever the file holds, one by one where they are not tied.
EAGLE1_SGLANG = SglangSchema(
    name="eagle1_sglang",
    tensors=(
        *_tensors("attention_bias"),
        TensorRow(FC_BIAS),
        TensorRow(OUTPUT_BIAS, when=lambda config: config["attention_bias"]),
    ),
    keys={
        "architectures": ["LlamaForCausalLMEagle"],
        **LLAMA_KEYS,
        **_ACTIVATION,
        "attention_bias": attrgetter("head.options.qkv_bias"),
    },
)


def load_eagle1_directory(path: Path | str, target: Target) -> Eagle1Head:
    """Return the head in a directory of EAGLE's layout, fp32, on the target's device.

    The layer is what config.json says, its defaults those of a Llama configuration, RoPE included: where it names no
    rope_theta, that is 10000 whatever the target's, as EAGLE's own decoder and the engines take it. Biases of `fc` (in
    the first published heads) and of the projections (for Qwen2) are read where the file has them, unless EAGLE's keys
    `bias` and `qkv_bias` contradict it. An embedding that differs from the target's is kept; without one, the head
    reads the target's.

    Nothing in the files names the target: it is known by its sizes alone. Raises UserError for other sizes than the
    target's, more layers than one, and weights that are missing, damaged, surplus, misshapen or in need of code.
    """
    path = Path(path)
    config = read_config(path)
    check_sizes(path, config, target)
    file, stored = read_weights(path, target.device)
    tensors = tidy(stored, file, target)
    if "fc.weight" not in tensors:
        raise UserError(
            f"{file} lacks the tensor fc.weight, so it is no EAGLE-1 head: give the folder of a draft head."
        )
    projection = tensors.pop(PROJECTION, None)
    if projection is not None and not is_the_same(projection, target.head.weight):
        raise UserError(
            f"{file} holds an {PROJECTION} that is not the target's, but EAGLE-1 heads draft with the target's own: give "
            "the target that it was made for, or another head."
        )
    for name in (FC_BIAS, OUTPUT_BIAS):
        if name in tensors and not config.get("bias") and not bool(tensors[name].any()):
            del tensors[name]  # SGLang's layout has zeros where the head has no bias
    options = Eagle1Options(
        fc_bias=bool(config.get("bias", FC_BIAS in tensors)),
        qkv_bias=bool(config.get("qkv_bias", "layers.0.self_attn.q_proj.bias" in tensors)),
    )
    with explain_config(path, "Llama layer", "fetch the head again"), torch.device(target.device):
        head = Eagle1Head(options, read_layer(config), target)
    fill(head, tensors, file, remedy="fetch the head again")
    return head


_BOTH_LACK = (
    Rule(
        "a target whose output projection has a bias",
        "leaves the bias out of the drafts",
        "measure it with draftsmith evaluate, or train an EAGLE-3 head, which has a projection of its own",
        biased_target,
    ),
    Rule(
        "another activation than SiLU",
        "stops at it",
        "measure it with draftsmith evaluate",
        lambda files, target, head: files.config["hidden_act"] != "silu",
    ),
)

_DROPPED = Rule(
    "a bias of `fc`",
    "drops it in silence",
    "export the layout eagle1_sglang for SGLang, which adds it",
    lambda files, target, head: FC_BIAS in files.tensors,
)
_VLLM = Served(
    engines.start_vllm("eagle"),
    rules=(_DROPPED, *_BOTH_LACK),
    caveats=(engines.name_the_method("eagle"), engines.VLLM_SAME_GPUS),
)
_BOUND = Rule(
    "input embeddings of its own",
    "takes the target's in silence",
    "export the layout eagle1 for vLLM, which keeps them",
    changed_embedding,
)
_SGLANG = Served(
    engines.start_sglang("EAGLE"),
    rules=(_BOUND, *_BOTH_LACK),
    caveats=("The algorithm is EAGLE, not EAGLE3.", engines.SGLANG_ROOT),
    needs="ends",
)

LAYOUTS = (
    Layout("eagle1", EAGLE1, load_eagle1_directory, {"vllm": _VLLM}),
    Layout("eagle1", EAGLE1_SGLANG, load_eagle1_directory, {"sglang": _SGLANG}),
)

FORMATS = (Format("an EAGLE-1 head", 11, lambda f: "fc.weight" in f.names, load_eagle1_directory),)
