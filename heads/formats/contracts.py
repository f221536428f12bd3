"""What serving engines read, as data: tensor names, shapes and dtypes, configuration keys, and why they matter.

Engines load a wrong checkpoint in silence more often than not (a missing norm, absolute ids where offsets belong,
a flag they do not know), so everything is checked on our side, before a byte is written. The contracts themselves
are in the formats.py of each method.

Shapes are written in symbols, "A*Ht" being a product; each contract says what its symbols stand for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from string import Formatter
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.target.target import Target

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Config = Mapping[str, Any]
_MISSING = object()


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory holds: config.json and the tensors of the file `weights`.

    dtype: of all float tensors. sizes: what symbols of the contract stand for that config.json does not say. copies: by
    name, further files that are copied as they are.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    dtype: torch.dtype
    weights: str = "model.safetensors"
    sizes: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportRequest:
    """What the caller of an export chooses. num_speculative_tokens: how many tokens an engine is told to draft."""

    dtype: torch.dtype
    num_speculative_tokens: int | None = None


@dataclass(frozen=True)
class TensorRule:
    """One tensor, or one per value of each placeholder of the contract in its name ("{i}").

    shape: symbols. dtype: None for that of the floats. when: whether the configuration asks for it, None for always.
    optional: it may be missing.
    """

    name: str
    shape: tuple[str, ...]
    dtype: torch.dtype | None = None
    when: Callable[[Config], bool] | None = None
    optional: bool = False


@dataclass(frozen=True)
class KeyRule:
    """One key of config.json ("a.b" for b inside a): its type, the only value allowed (None for any), and why."""

    name: str
    kind: type
    why: str
    only: Any = None
    optional: bool = False


def layer_sizes(config: Config) -> dict[str, int]:
    """Return what the symbols of LLAMA_KEYS stand for; M is the number of layers, W the draft vocab where that has a size."""
    flat = flatten(config)
    names = {
        "V": "vocab_size",
        "H": "hidden_size",
        "I": "intermediate_size",
        "N": "num_attention_heads",
        "G": "num_key_value_heads",
        "D": "head_dim",
        "M": "num_hidden_layers",
        "W": "draft_vocab_size",
    }
    return {symbol: flat[name] for symbol, name in names.items() if name in flat}


@dataclass(frozen=True)
class Contract:
    """A layout: its tensors (no others may be there), its keys (`forbidden` ones may not), and further checks.

    sizes: from the configuration, what symbols stand for. ranges: placeholder in tensor names -> the symbol that counts its
    values, "1:A" where they start at 1; a symbol in braces, "{n}", stands for its own value. closed: why no key without a rule
    may be there, "" where it may. more_tensors: rules that follow from the configuration by more than a count. A key
    torch_dtype and a map d2t of a draft vocabulary are checked wherever a contract has them.

    What heads of a layout's method may have and its engines lack is not here but in the rules of its layout, which are asked
    first: what breaks a contract is a fault of the converter.
    """

    name: str
    tensors: tuple[TensorRule, ...]
    keys: tuple[KeyRule, ...]
    sizes: Callable[[Config], dict[str, int]] = layer_sizes
    ranges: Mapping[str, str] = field(default_factory=dict)
    forbidden: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Callable[["Contract", ModelFiles], None], ...] = ()
    closed: str = ""
    more_tensors: Callable[[Config], tuple[TensorRule, ...]] | None = None


def lookup(config: Config, name: str) -> Any:
    """Return the value at the dotted path `name`, or a marker that no value equals where it is missing."""
    value: Any = config
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def validate(files: ModelFiles, contract: Contract) -> None:
    """Raise UserError naming the key or tensor, what the contract expects and what it got; else do nothing."""
    _check_keys(files.config, contract)
    sizes = {**files.sizes, **contract.sizes(files.config)}
    expected = _expected_tensors(files.config, contract, sizes)
    for name in sorted(files.tensors.keys() - expected.keys()):
        raise broken(contract, f"tensor {name}", "no such tensor", f"one of shape {list(files.tensors[name].shape)}")
    for name, rule in expected.items():
        shape = [prod(sizes[s] if s in sizes else int(s) for s in axis.split("*")) for axis in rule.shape]
        if name not in files.tensors:
            if rule.optional:
                continue
            raise broken(contract, f"tensor {name}", f"shape {shape}", "nothing")
        found, dtype = files.tensors[name], rule.dtype or files.dtype
        if list(found.shape) != shape:
            raise broken(contract, f"tensor {name}", f"shape {shape}", f"{list(found.shape)}")
        if found.dtype != dtype:
            raise broken(contract, f"tensor {name}", f"{dtype}", f"{found.dtype}")
    _check_dtype(files, contract)
    _check_draft_vocab(files, contract)
    for check in contract.checks:
        check(contract, files)


def broken(contract: Contract, what: str, expected: str, got: str) -> UserError:
    """Return the sentence for a broken rule."""
    return UserError(
        f"The export does not fit the layout {contract.name}: {what}: expected {expected}, got {got}; this is a fault of "
        "draftsmith, so report it, and export another layout meanwhile."
    )


def _check_keys(config: Config, contract: Contract) -> None:
    for rule in contract.keys:
        value, what = lookup(config, rule.name), f"config key {rule.name}"
        if value is _MISSING:
            if rule.optional:
                continue
            raise broken(contract, what, f"a {rule.kind.__name__} ({rule.why})", "nothing")
        if type(value) is not rule.kind:
            raise broken(contract, what, f"a {rule.kind.__name__} ({rule.why})", repr(value))
        if rule.only is not None and value != rule.only:
            raise broken(contract, what, f"{rule.only!r} ({rule.why})", repr(value))
    unknown = sorted(config.keys() - {rule.name for rule in contract.keys}) if contract.closed else []
    for name, why in [*contract.forbidden.items(), *((name, contract.closed) for name in unknown)]:
        if (value := lookup(config, name)) is not _MISSING:
            raise broken(contract, f"config key {name}", f"no such key ({why})", repr(value))


def _check_dtype(files: ModelFiles, contract: Contract) -> None:
    """A key torch_dtype names the dtype that the float tensors have."""
    name = str(files.dtype).removeprefix("torch.")
    for key in (rule.name for rule in contract.keys if rule.name.endswith("torch_dtype")):
        if (found := lookup(files.config, key)) != name:
            raise broken(contract, f"config key {key}", f"{name!r}, the dtype of the tensors", repr(found))


def _check_draft_vocab(files: ModelFiles, contract: Contract) -> None:
    """A map d2t holds offsets (target id = i + d2t[i]) that name distinct ids, ascending; t2d marks the same ids."""
    if "d2t" not in files.tensors:
        return
    target_ids, V = (
        files.tensors["d2t"].cpu() + torch.arange(len(files.tensors["d2t"])),
        flatten(files.config)["vocab_size"],
    )
    inside = bool(((target_ids >= 0) & (target_ids < V)).all())
    if not inside or not bool((target_ids.diff() > 0).all()):
        raise broken(
            contract,
            "tensor d2t",
            f"offsets such that i + d2t[i] are ascending ids below {V}",
            f"ids {int(target_ids.min())}..{int(target_ids.max())} (are they absolute ids?)",
        )
    marked = files.tensors["t2d"].cpu().nonzero().flatten() if "t2d" in files.tensors else target_ids
    if not torch.equal(marked, target_ids):
        raise broken(contract, "tensor t2d", "true exactly at i + d2t[i]", f"{len(marked)} other true entries")


def _expected_tensors(config: Config, contract: Contract, sizes: Mapping[str, int]) -> dict[str, TensorRule]:
    expected = {}
    more = () if contract.more_tensors is None else contract.more_tensors(config)
    for rule in (*contract.tensors, *more):
        if rule.when is not None and not rule.when(config):
            continue
        used = [name for _, name, _, _ in Formatter().parse(rule.name) if name and name in contract.ranges]
        for values in product(*(_values(contract.ranges[name], sizes) for name in used)):
            name = rule.name.format(**{**sizes, **dict(zip(used, values, strict=True))})
            expected[name] = replace(rule, name=name)
    return expected


def _values(counted: str, sizes: Mapping[str, int]) -> range:
    """Return the values of a placeholder: "A" for 0..A-1, "1:A" for 1..A-1."""
    first, _, symbol = counted.rpartition(":")
    return range(int(first or 0), sizes[symbol])


def llama_layer(prefix: str, reads: str = "H") -> tuple[TensorRule, ...]:
    """Return the weights of a Llama layer. reads: how wide the input of its attention is."""
    shapes = {
        "input_layernorm": ("H",),
        "self_attn.q_proj": ("N*D", reads),
        "self_attn.k_proj": ("G*D", reads),
        "self_attn.v_proj": ("G*D", reads),
        "self_attn.o_proj": ("H", "N*D"),
        "post_attention_layernorm": ("H",),
        "mlp.gate_proj": ("I", "H"),
        "mlp.up_proj": ("I", "H"),
        "mlp.down_proj": ("H", "I"),
    }
    return tuple(TensorRule(f"{prefix}{name}.weight", shape) for name, shape in shapes.items())


def replace_keys(rules: Sequence[KeyRule], why: str = "", **only: Any) -> tuple[KeyRule, ...]:
    """Return the rules, those of the keys in `only` with that value as the only one, None for any; why: for what reason."""
    return tuple(replace(r, only=only[r.name], why=why or r.why) if r.name in only else r for r in rules)


LLAMA_KEYS = (
    KeyRule("model_type", str, "the layer is a Llama layer", "llama"),
    KeyRule("num_hidden_layers", int, "engines build one draft layer", 1),
    KeyRule("vocab_size", int, "the target's, V"),
    KeyRule("hidden_size", int, "H"),
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
)
"""What describes one Llama layer. Symbols: V target vocab, H draft hidden, I feed-forward width, N query heads, G key/value
heads, D head size."""


def target_reference(target: Target) -> str:
    """Return how an engine finds the target from wherever it is started: the full path of a folder or file, or a Hub name."""
    return str(Path(target.path).resolve()) if Path(target.path).exists() else target.path


# A speculators config keeps what makes the layer in a section of its own.
LAYER_SECTION = "transformer_layer_config"


def flatten(config: Config) -> dict[str, Any]:
    """Return the keys of a flat config.json for either kind: those of the layer's section move to the top."""
    section = config.get(LAYER_SECTION)
    return {**section, **config} if isinstance(section, Mapping) else dict(config)
