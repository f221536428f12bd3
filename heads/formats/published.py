"""What the converters and readers of published layouts have in common.

Shapes: V target vocab, W draft vocab.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import EMBEDDING, borrows_embedding
from draftsmith.heads.files import CONFIG
from draftsmith.heads.formats.schema import Schema
from draftsmith.target.target import Target


def check_sizes(
    path: Path, config: Mapping[str, Any], target: Target, *, shapes: bool = False, llama: bool = True
) -> None:
    """Raise UserError unless a head of this configuration reads and drafts for a target of these sizes.

    shapes: the head may have several layers, and a width of its own beside that of the target, which it names. llama: its layers are like Llama's.
    """
    width = "target_hidden_size" if shapes and config.get("target_hidden_size") is not None else "hidden_size"
    for key, value in {"vocab_size": target.vocab_size, width: target.hidden_size}.items():
        if config.get(key) != value:
            raise UserError(
                f"{path / CONFIG} says {key} {config.get(key)!r}, but the target {target.path} has {value}: this is a draft "
                "for another target; give the one that it was made for."
            )
    what = uncomputed_attention(config) if llama else None
    if what is not None:
        raise UserError(
            f"{path / CONFIG} describes a head that {what}, which is not computed here: serve it with the engine that it was made "
            "for, or train one."
        )
    layers = config.get("num_hidden_layers", 1)
    if type(layers) is not int or layers < 1 or (layers > 1 and not shapes):
        least = "a head has at least one" if shapes else "an EAGLE head has one"
        raise UserError(
            f"{path / CONFIG} says num_hidden_layers {layers!r}, but {least} decoder layer: give the folder of such a head."
        )


def uncomputed_attention(config: Mapping[str, Any]) -> str | None:
    """Return what an attention of this configuration does that Llama's does not, and names of tensors need not tell; None for nothing."""
    ropes = [
        config,
        *(rope for key in ("rope_scaling", "rope_parameters") if isinstance(rope := config.get(key), dict)),
    ]
    shares = ((key, rope.get(key)) for rope in ropes for key in ("partial_rotary_factor", "rotary_pct", "rope_pct"))
    partial = [(key, share) for key, share in shares if share not in (None, 1)]
    if config.get("kv_lora_rank"):
        return f"compresses its keys and values (MLA, kv_lora_rank {config['kv_lora_rank']!r})"
    return f"turns a part of each head by position ({partial[0][0]} {partial[0][1]!r})" if partial else None


def read_layer(config: Mapping[str, Any]) -> LlamaConfig:
    """Return the Llama layer that `config` describes, with the defaults of a Llama configuration: where it names no
    rope_theta, that is 10000 whatever the target's, as EAGLE's own decoder and the engines take it.

    Raises what `explain_config` makes a sentence of.
    """
    layer = LlamaConfig.from_dict(dict(config))
    heads, groups = layer.num_attention_heads, layer.num_key_value_heads
    if heads % groups:
        raise ValueError(f"{groups} key/value heads do not divide {heads} heads")
    return layer


def tidy(tensors: Mapping[str, Tensor], file: Path, target: Target, names: Schema | None = None) -> dict[str, Tensor]:
    """Return the tensors by the head's names, less an embedding that is the target's. names: the schema, if the file uses other
    names than the head; the rest loses a leading `model.`.

    Raises UserError where two have the same name, and for quantized ones (d2t and t2d are no weights).
    """
    known = set() if names is None else {name for name in tensors if names.knows(name)}
    plain = {name if name in known else re.sub(r"^(model\.)+", "", name): value for name, value in tensors.items()}
    if len(plain) < len(tensors):
        raise UserError(f"{file} holds a tensor twice, with and without the prefix `model.`: fetch the head again.")
    plain = plain if names is None else names.rename(plain)
    for name, value in plain.items():
        if not value.is_floating_point() and name not in ("d2t", "t2d", "token_map"):
            raise UserError(f"{file} holds {name} as {value.dtype}: give a head that is not quantized.")
    if EMBEDDING in plain and borrows_embedding(plain[EMBEDDING], target):
        del plain[EMBEDDING]
    return plain


def is_the_same(held: Tensor, own: Tensor) -> bool:
    """Whether a tensor in a file is the target's, in the coarser dtype of both; one of another shape is not."""
    return torch.equal(held.to(own), own) or torch.equal(held, own.to(held))


def vocab_offsets(ids: Tensor) -> Tensor:
    """Sorted target ids [W] -> d2t [W], such that id i of the draft is the target's i + d2t[i]."""
    return ids - torch.arange(len(ids), device=ids.device)


def take_vocab(tensors: dict[str, Tensor], W: int | None, file: Path, target: Target) -> Tensor | None:
    """Take d2t and t2d out of the tensors of `file`; return the sorted target ids [W] that d2t stands for, None for the whole
    vocabulary.

    W: what the configuration says, None for nothing. t2d, where it is there, marks the same ids: absolute ids in place of
    offsets may be ascending too.
    """
    d2t, t2d, V = tensors.pop("d2t", None), tensors.pop("t2d", None), target.vocab_size
    if d2t is None and W not in (None, V):
        raise UserError(
            f"{file} lacks the tensor d2t, but its draft vocabulary has {W!r} of {V} tokens: fetch the whole head."
        )
    if d2t is None:
        return None
    ids = torch.arange(len(d2t), device=d2t.device) + d2t
    fits = (
        not ids.is_floating_point()
        and W in (None, len(ids))
        and int(ids.min()) >= 0
        and int(ids.max()) < V
        and bool((ids.diff() > 0).all())
    )
    if not fits or (t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids)):
        raise UserError(
            f"{file}: d2t does not hold {W or len(ids)} offsets of ascending target ids; fetch or export the head again."
        )
    return None if len(ids) == V else ids


def check_mask_token(path: Path, token: Any, target: Target) -> None:
    """Raise UserError unless what a configuration says of the mask token is a token of the target."""
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise UserError(
            f"{path / CONFIG} says mask_token_id {token!r}, but the target has tokens 0 to {target.vocab_size - 1}: write "
            "there the token that the head was trained with."
        )


def check_width(file: Path, width: int, target: Target) -> None:
    """Raise UserError unless heads of that width read the states of the target."""
    if width != target.hidden_size:
        raise UserError(
            f"{file} holds heads of width {width}, but the target {target.path} has {target.hidden_size} hidden units: give "
            "the target that they were made for."
        )
