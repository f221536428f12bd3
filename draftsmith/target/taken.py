"""Which tensors of a checkpoint the model took. Modules beside the decoder may be left out and are named; any other tensor that is
left out is refused.

transformers drops a tensor that a class has no place for, such as the scale of a quantized weight or a bias that the
configuration denies, and reads the numbers of a float8 or integer weight as they stand. Either way it computes another model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from draftsmith.errors import UserError
from draftsmith.foreign.tensors import TensorSpan
from draftsmith.target.config import UNQUANTIZED, check_dtypes, how_to_read

_MTP = re.compile(r"(^|[._])(mtp|nextn)([._]|$)")
_OF_MTP_LAYER = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\b")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OTHER_INPUTS = re.compile(
    r"vision|visual|image|video|audio|speech|talker|2wav|multi_?modal|mm_projector|resampler|perceiver"
)
"""Modules beside the text decoder, in the part of a name above its layers."""
_OF_QUANTIZED = re.compile(
    r"(scales?(_inv|_\d)?|qscale_(weight|act)|zero_?points?|zeros|_packed|_shape|g_idx|qweight|\.biases|SCB|scb|amax|absmax|quant_map"
    r"|codes|codebooks|weight_format)$|quant_state"
)
_OF_CACHE = re.compile(r"att.*\b((k|v|kv|q|prob)_(scale|zero_point)|[kv]_proj\.output_scale)$")
"""Scales of keys and values, for engines that are told to keep these in 8 bits; the weights are the same without them."""
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|position_ids|num_batches_tracked|(en|de)coder\.version)$")
"""Tables of earlier versions that hold nothing learned."""


def check_taken(
    path: str, model: Any, info: Mapping[str, Any], spans: Sequence[TensorSpan], quantized: str | None
) -> str:
    """Return a sentence about what a checkpoint holds beside the model (MTP layers, vision towers, scales of a cache), "" for none.

    info: what transformers says of the loading. Raises UserError, naming a tensor, where the model did not take one of its own,
    lacks one, takes another shape, needs the scale of a quantized weight, or where config.json ties two tensors that differ.
    """
    held, name = model.state_dict(), type(model).__name__
    unexpected = set(info["unexpected_keys"])
    masks = {s.name for s in spans if s.shape[:2] == (1, 1) and len(s.shape) == 4}  # of earlier versions
    on_purpose = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    ignored = {s.name for s in spans if s.name not in held and any(one.search(s.name) for one in on_purpose)}
    left = (unexpected | ignored) - masks
    modules, lost = _sorted_out(
        left, unexpected, spans, model.config.get_text_config(decoder=True).num_hidden_layers, quantized
    )
    if parts := list(filter(_OF_QUANTIZED.search, lost)):
        raise UserError(
            f"The target {path} holds {_and_more(parts)}, for which {name} has no place; it is a part of quantized weights, which "
            f"would be taken for others without it: {UNQUANTIZED}."
        )
    if not quantized:
        check_dtypes(path, [span for span in spans if span.name not in left], held)
    if mismatched := sorted(info["mismatched_keys"]):
        tensor, there, wanted = mismatched[0]
        raise UserError(
            f"The target {path} holds {tensor} in the shape {list(there)} where {name} takes {list(wanted)}: they are of different "
            f"models, or not quantized as config.json says; {how_to_read(quantized)}."
        )
    if bare := [n for n, m in model.named_modules() if type(m) is nn.Linear and m.weight.dtype.itemsize < 2]:
        raise UserError(
            f"The target {path} has no scale for the quantized weight of {_and_more(bare)}: {how_to_read(quantized)}."
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"The target {path} has no weights for {_and_more(missing)}: it was saved without its "
            "language-model head or incompletely; save it as a causal language model."
        )
    if apart := sorted(model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys):
        raise UserError(
            f"The target {path} holds its own {apart[0]}, but its config.json ties that to the embeddings (tie_word_embeddings): "
            "serving engines compute with the embeddings, transformers with both; set tie_word_embeddings to false, or take that "
            "tensor out of the file if the model is tied."
        )
    if lost:
        raise UserError(
            f"The target {path} holds {_and_more(lost)}, for which {name} has no place; without it this is another model: see that "
            "config.json belongs to these weights (num_hidden_layers, attention_bias, mlp_bias), or fetch the target again."
        )
    if not modules:
        return ""
    listed = "; ".join(f"{what}: {_and_more(names)}" for what, names in modules.items())
    return f"the target {path} is used without what its files hold beside the decoder ({listed})"


def _sorted_out(
    left: set[str], unexpected: set[str], spans: Iterable[TensorSpan], layers: int, quantized: str | None
) -> tuple[dict[str, list[str]], list[str]]:
    """Sort tensors that the model left: into modules beside the decoder, by what these are, and those that the model needs.

    unexpected: tensors that the class does not leave on purpose. layers: of the decoder; a layer above them is MTP's, or missing.
    """
    of_mtp = {
        layer_name[1] for span in spans if (layer_name := _LAYER.search(span.name)) and _OF_MTP_LAYER.search(span.name)
    }
    modules: dict[str, list[str]] = {}
    lost = []
    for name in sorted(left):
        layer = _LAYER.search(name)
        beyond = layer is not None and int(layer[1]) >= layers
        if _MTP.search(name) or (beyond and layer is not None and layer[1] in of_mtp):
            modules.setdefault("MTP layers", []).append(name)
        elif _OTHER_INPUTS.search(name[: layer.start()] if layer else name):
            modules.setdefault("other inputs than text", []).append(name)
        elif not quantized and not beyond and _OF_CACHE.search(name):
            modules.setdefault("scales of an 8-bit cache", []).append(name)
        elif (name in unexpected and not _BUFFERS.search(name)) or beyond or _OF_QUANTIZED.search(name):
            lost.append(name)
    return modules, lost


def _and_more(names: Sequence[str]) -> str:
    return f"{names[0]}{f' and {len(names) - 1} more tensors' if len(names) > 1 else ''}"
