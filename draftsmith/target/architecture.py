"""Which architectures can be targets, told by the configuration alone, before any weights are read."""

from typing import Any

from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code

_MASKED = frozenset({"full_attention", "sliding_attention"})
"""Layers whose past a mask alone describes, so that a tree of drafts can be given one."""


def check_causal(path: str, config: Any, trust_remote_code: bool) -> None:
    """Raise UserError unless the configuration is one of a causal, decoder-only language model whose past can be rolled back."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"The target {path} is an encoder-decoder model ({config.model_type}): "
            "choose a decoder-only causal language model."
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not trust_remote_code:
        raise UserError(
            f"The target {path} is of type {config.model_type!r}, not a causal language model: "
            "choose a decoder-only model that can generate text."
        )
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise UserError(
            f"The target {path} of type {config.model_type!r} cannot be used: its attention weighs tokens by their distance in the cache "
            "(ALiBi), which is another one in a tree of drafts; choose a target with rotary or learned positions."
        )
    check_layer_types(path, config, _class_of(config))


def check_layer_types(path: str, config: Any, model_class: type | None) -> None:
    """Raise UserError, naming the types, where layers keep a state that no draft can be taken back from, or a past that is neither
    full nor a sliding window.

    model_class: of transformers or of the model's own code, None where it is not known yet.
    """
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    odd = sorted(set(types) - _MASKED)
    recurrent = [
        one for one in odd if issubclass(DYNAMIC_LAYER_TYPE_MAPPING.get(one, object), LinearAttentionCacheLayerMixin)
    ]
    # A class of hybrids may be configured without any layer that has a state.
    if recurrent or (getattr(model_class, "_is_stateful", False) and (odd or not types)):
        layers = f"layers of type {', '.join(recurrent or odd)}" if odd else "layers"
        raise UserError(
            f"The target {path} of type {config.model_type!r} cannot be used: its {layers} keep a running state that cannot be "
            "rolled back when drafts are rejected; choose a target whose layers are all attention."
        )
    if odd:
        raise UserError(
            f"The target {path} of type {config.model_type!r} has layers of type {', '.join(odd)}, whose past a draft tree cannot "
            "be given yet: choose another target."
        )


def attention_of(config: Any, asked: str) -> str:
    """Return the attention implementation to load a model with: eager for a class that transformers has no other for (Gemma 2's
    soft-capping, gpt-oss's sinks), else the one `asked`."""
    model_class: Any = _class_of(config)
    return "eager" if asked == "sdpa" and model_class is not None and not model_class._supports_sdpa else asked


def _class_of(config: Any) -> type | None:
    with foreign_code(f"transformers cannot open models of type {config.model_type!r}", "choose another target"):
        found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found
