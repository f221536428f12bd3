"""What serving engines read, as data: tensor names, shapes and dtypes, configuration keys, and why they matter.

Engines load a wrong checkpoint in silence more often than not (a missing norm, absolute ids where offsets belong,
a flag they do not know), so everything is checked on our side, before a byte is written.

Symbols in shapes: H draft hidden, Ht target hidden, V target vocab, W draft vocab, A aux layers, I feed-forward
width, N query heads, G key/value heads, D head size; "A*Ht" is a product.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Config = Mapping[str, Any]


@dataclass(frozen=True)
class TensorRule:
    """One tensor (or one per aux layer, with "{i}" in its name).

    shape: symbols. dtype: None for the float dtype that the configuration names. when: the config key that must be
    true for the tensor to be there, "" for always. optional: it may be missing.
    """

    name: str
    shape: tuple[str, ...]
    dtype: torch.dtype | None = None
    when: str = ""
    optional: bool = False


@dataclass(frozen=True)
class KeyRule:
    """One key of config.json: its type, the only value allowed (None for any), and why."""

    name: str
    kind: type
    why: str
    only: Any = None
    optional: bool = False


@dataclass(frozen=True)
class Contract:
    """A layout: its tensors (no others may be there), its keys (`forbidden` ones may not), and further checks."""

    name: str
    tensors: tuple[TensorRule, ...]
    keys: tuple[KeyRule, ...]
    forbidden: Mapping[str, str]
    checks: tuple[Callable[["Contract", Mapping[str, Tensor], Config], None], ...]


def dimensions(config: Config) -> dict[str, int]:
    """Return what the symbols in shapes stand for."""
    return {
        "H": config["hidden_size"],
        "Ht": config["target_hidden_size"],
        "V": config["vocab_size"],
        "W": config["draft_vocab_size"],
        "A": len(config["eagle_aux_hidden_state_layer_ids"]),
        "I": config["intermediate_size"],
        "N": config["num_attention_heads"],
        "G": config["num_key_value_heads"],
        "D": config["head_dim"],
        "2": 2,
    }


def validate(tensors: Mapping[str, Tensor], config: Config, contract: Contract) -> None:
    """Raise UserError naming the key or tensor, what the contract expects and what it got; else do nothing."""
    _check_keys(config, contract)
    expected = _expected_tensors(config, contract)
    for name in sorted(tensors.keys() - expected.keys()):
        raise _broken(contract, f"tensor {name}", "no such tensor", f"one of shape {list(tensors[name].shape)}")
    sizes = dimensions(config)
    for name, rule in expected.items():
        if name not in tensors:
            if rule.optional:
                continue
            raise _broken(contract, f"tensor {name}", f"shape {_shape(rule, sizes)}", "nothing")
        found = tensors[name]
        if list(found.shape) != _shape(rule, sizes):
            raise _broken(contract, f"tensor {name}", f"shape {_shape(rule, sizes)}", f"{list(found.shape)}")
        dtype = rule.dtype or getattr(torch, config["torch_dtype"])
        if found.dtype != dtype:
            raise _broken(contract, f"tensor {name}", f"{dtype}", f"{found.dtype}")
    for check in contract.checks:
        check(contract, tensors, config)


def _check_keys(config: Config, contract: Contract) -> None:
    for rule in contract.keys:
        if rule.name not in config:
            if rule.optional:
                continue
            raise _broken(contract, f"config key {rule.name}", f"a {rule.kind.__name__} ({rule.why})", "nothing")
        value = config[rule.name]
        if type(value) is not rule.kind:
            raise _broken(contract, f"config key {rule.name}", f"a {rule.kind.__name__} ({rule.why})", repr(value))
        if rule.only is not None and value != rule.only:
            raise _broken(contract, f"config key {rule.name}", f"{rule.only!r} ({rule.why})", repr(value))
    for name, why in contract.forbidden.items():
        if name in config:
            raise _broken(contract, f"config key {name}", f"no such key ({why})", repr(config[name]))


def _expected_tensors(config: Config, contract: Contract) -> dict[str, TensorRule]:
    count = len(config["eagle_aux_hidden_state_layer_ids"])
    rules = [rule for rule in contract.tensors if not rule.when or config[rule.when]]
    many = [replace(r, name=r.name.format(i=i)) for r in rules for i in range(count if "{i}" in r.name else 1)]
    return {rule.name: rule for rule in many}


def _shape(rule: TensorRule, sizes: Mapping[str, int]) -> list[int]:
    return [prod(sizes[symbol] for symbol in axis.split("*")) for axis in rule.shape]


def _broken(contract: Contract, what: str, expected: str, got: str) -> UserError:
    return UserError(f"The export does not fit the layout {contract.name}: {what}: expected {expected}, got {got}.")


def _check_draft_vocab(contract: Contract, tensors: Mapping[str, Tensor], config: Config) -> None:
    """d2t holds offsets (target id = i + d2t[i]) that name distinct ids, ascending, the same as t2d."""
    target_ids = torch.arange(config["draft_vocab_size"]) + tensors["d2t"].cpu()
    inside = bool(((target_ids >= 0) & (target_ids < config["vocab_size"])).all())
    if not inside or not bool((target_ids.diff() > 0).all()):
        raise _broken(
            contract,
            "tensor d2t",
            f"offsets such that i + d2t[i] are ascending ids below {config['vocab_size']}",
            f"ids {int(target_ids.min())}..{int(target_ids.max())} (are they absolute ids?)",
        )
    marked = tensors["t2d"].cpu().nonzero().flatten()
    if not torch.equal(marked, target_ids):
        raise _broken(contract, "tensor t2d", "true exactly at i + d2t[i]", f"{len(marked)} other true entries")


def _check_aux_layers(contract: Contract, tensors: Mapping[str, Tensor], config: Config) -> None:
    """Engines assume three aux layers unless num_aux_hidden_states says otherwise."""
    count = len(config["eagle_aux_hidden_state_layer_ids"])
    if config.get("num_aux_hidden_states", 3) != count:
        found = repr(config.get("num_aux_hidden_states", "nothing"))
        raise _broken(contract, "config key num_aux_hidden_states", f"{count}, the number of aux layers", found)


def _check_three_aux_layers(contract: Contract, tensors: Mapping[str, Tensor], config: Config) -> None:
    layer_ids = config["eagle_aux_hidden_state_layer_ids"]
    if len(layer_ids) != 3:
        raise _broken(contract, "config key eagle_aux_hidden_state_layer_ids", "exactly three layers", repr(layer_ids))


def _layer(name: str, *shape: str) -> TensorRule:
    return TensorRule(f"midlayer.{name}.weight", shape)


# Flat EAGLE-3: vLLM, SGLang, TensorRT-LLM, llama.cpp. "midlayer." is the one prefix that all of them know:
# SGLang skips "layers.0." without a word.
EAGLE3 = Contract(
    name="eagle3",
    tensors=(
        TensorRule("fc.weight", ("H", "A*Ht")),
        TensorRule("fc_norm.{i}.weight", ("Ht",), when="fc_norm"),
        TensorRule("input_norm.weight", ("A*Ht",), when="norm_before_fc"),
        _layer("self_attn.q_proj", "N*D", "2*H"),
        _layer("self_attn.k_proj", "G*D", "2*H"),
        _layer("self_attn.v_proj", "G*D", "2*H"),
        _layer("self_attn.o_proj", "H", "N*D"),
        _layer("mlp.gate_proj", "I", "H"),
        _layer("mlp.up_proj", "I", "H"),
        _layer("mlp.down_proj", "H", "I"),
        _layer("input_layernorm", "H"),
        _layer("hidden_norm", "H"),
        _layer("post_attention_layernorm", "H"),
        TensorRule("norm.weight", ("H",)),
        TensorRule("lm_head.weight", ("W", "H")),
        TensorRule("d2t", ("W",), torch.int64),
        TensorRule("t2d", ("V",), torch.bool),
        TensorRule("embed_tokens.weight", ("V", "H"), optional=True),
    ),
    keys=(
        KeyRule("architectures", list, "how engines find the model class", ["LlamaForCausalLMEagle3"]),
        KeyRule("model_type", str, "the layer is a Llama layer", "llama"),
        KeyRule("num_hidden_layers", int, "engines build one draft layer", 1),
        KeyRule("vocab_size", int, "the target's, V"),
        KeyRule("draft_vocab_size", int, "W; without it engines expect V rows in lm_head"),
        KeyRule("hidden_size", int, "H"),
        KeyRule("target_hidden_size", int, "Ht"),
        KeyRule("intermediate_size", int, "I"),
        KeyRule("num_attention_heads", int, "N"),
        KeyRule("num_key_value_heads", int, "G"),
        KeyRule("head_dim", int, "D; H // N is not always right"),
        KeyRule("hidden_act", str, "engines know no other", "silu"),
        KeyRule("rms_norm_eps", float, "the same in training and serving"),
        KeyRule("rope_theta", float, "the base that engines read outside rope_parameters"),
        KeyRule("rope_parameters", dict, "base and scaling as trained"),
        KeyRule("rope_scaling", dict, "scaling as engines with older transformers read it", optional=True),
        KeyRule("max_position_embeddings", int, "the longest context"),
        KeyRule("attention_bias", bool, "biases do not load in llama.cpp", False),
        KeyRule("mlp_bias", bool, "biases do not load in llama.cpp", False),
        KeyRule("tie_word_embeddings", bool, "lm_head has rows of its own", False),
        KeyRule("torch_dtype", str, "the dtype of every float tensor"),
        KeyRule("eagle_aux_hidden_state_layer_ids", list, "top level; llama.cpp reads it nowhere else"),
        KeyRule("norm_before_residual", bool, "engines disagree about its default"),
        KeyRule("norm_before_fc", bool, "adds input_norm"),
        KeyRule("fc_norm", bool, "adds fc_norm"),
        KeyRule("norm_output", bool, "which state is fed back"),
        KeyRule("num_aux_hidden_states", int, "A; engines assume 3", optional=True),
    ),
    forbidden={"bias": "it would add biases to the drafts", "quantization_config": "the weights are plain"},
    checks=(_check_draft_vocab, _check_aux_layers),
)

# llama.cpp takes three aux layers, cannot convert fc_norm, and ignores norm_output without a word.
EAGLE3_LLAMA_CPP = replace(
    EAGLE3,
    name="eagle3_llama_cpp",
    keys=tuple(
        replace(k, only=False, why="llama.cpp does not serve it: train without it or export for another engine")
        if k.name in ("fc_norm", "norm_output")
        else k
        for k in EAGLE3.keys
    ),
    checks=(*EAGLE3.checks, _check_three_aux_layers),
)
