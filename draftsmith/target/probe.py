"""The self-check of a target at load: our taps, states and logits against the model's own on a few random tokens.

Shapes: B = 2 rows that differ in their last token only, n tokens, Ht target hidden size, V target vocab.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.foreign.code import foreign_code

if TYPE_CHECKING:
    from draftsmith.target.target import Target

PROBE_TOKENS = 8


@torch.no_grad()
def check_target(target: "Target") -> None:
    """Compare taps, final states and logits of `target` with its model's own, and set the head's scale and softcap.

    Raises UserError, naming the model type, where a later token changes an earlier state (as in an encoder), a tap differs
    from `output_hidden_states` (if the model gives any), or the logits are not the lm_head's under any known scale and softcap.
    """
    model, ids = target.model, probe_ids(target)
    every_layer = tuple(range(target.num_layers))
    what = f"The target {target.path} of type {target.model_type!r} does not run by itself"
    with foreign_code(what, "choose another target"):
        with _hooks_left_as_they_are(model):
            truth = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        seen = target.forward(ids, layer_ids=every_layer)
    if not (bool(seen.last.isfinite().all()) and bool(truth.logits.isfinite().all())):
        raise UserError(_why_not_finite(target))
    if not is_close(seen.last[0, :-1], seen.last[1, :-1], loose=True):
        raise UserError(
            f"The target {target.path} ({target.model_type}) lets later tokens change earlier ones, as an "
            "encoder-only model does: choose a decoder-only causal language model."
        )
    if seen.aux.shape != (*ids.shape, target.num_layers * target.hidden_size):
        raise _refusal(target, "its residual streams are not one vector of hidden_size per token")
    hidden_states = getattr(truth, "hidden_states", None)
    streams = seen.aux.unflatten(-1, (target.num_layers, target.hidden_size))
    if hidden_states is not None and len(hidden_states) == target.num_layers + 1:
        for k in every_layer:
            if not is_close(streams[..., k, :], hidden_states[k]):
                raise _refusal(target, f"the stream entering layer {k} is not its hidden_states[{k}]")
    for scale, softcap in _head_rules(target.config):
        target.head.scale, target.head.softcap = scale, softcap
        if is_close(target.head.logits(seen.last), truth.logits):
            return
    raise _refusal(target, "its logits are not the lm_head's product under any known scale or softcap")


@contextmanager
def _hooks_left_as_they_are(model: nn.Module) -> Iterator[None]:
    """Take out the hooks that transformers leaves in every layer of which hidden states were asked: each costs as much as a small
    product in every later pass."""
    before = [(module, module._forward_hooks.copy()) for module in model.modules()]
    yield
    for module, hooks in before:
        module._forward_hooks.clear()
        module._forward_hooks.update(hooks)
        vars(module).pop("_output_capturing_hooks_installed", None)


def _why_not_finite(target: "Target") -> str:
    """Return the sentence about a target whose states or logits are NaN or infinite."""
    for name, weight in target.model.named_parameters():
        if not bool(weight.isfinite().all()):
            return f"The target {target.path} has NaN or infinity in its weights ({name}): fetch it again."
    return (
        f"The target {target.path} computes NaN or infinity in {target.dtype_name}, though its weights are finite: set "
        "target.dtype to float32 or bfloat16."
    )


def probe_ids(target: "Target") -> Tensor:
    """Return ids [2, n] away from both ends of the vocabulary, where special tokens are; rows differ in the last one."""
    vocab = target.embedding.shape[0]
    # On the CPU also where a head is being built on another device.
    generator, most = torch.Generator().manual_seed(0), max(vocab // 2, vocab // 4 + 2)
    row = torch.randint(vocab // 4, most, (PROBE_TOKENS,), generator=generator, device="cpu")
    other = row.clone()
    other[-1] = vocab // 4 + (row[-1] - vocab // 4 + 1) % max(vocab // 4, 2)
    return torch.stack((row, other)).to(target.device)


def _head_rules(config: Any) -> Iterator[tuple[float, float | None]]:
    """Yield (scale, softcap) pairs to try, what the config names first.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it;
    Gemma and others cap by `final_logit_softcapping`.
    """
    scales: list[float] = []
    if multiplier := getattr(config, "logit_scale", None):
        scales.append(float(multiplier))
    if divisor := getattr(config, "logits_scaling", None):
        scales += [1.0 / float(divisor), float(divisor)]
    softcap = getattr(config, "final_logit_softcapping", None)
    softcaps = [float(softcap), None] if softcap else [None]
    yield from itertools.product([*scales, 1.0], softcaps)


def is_close(ours: Tensor, theirs: Tensor, loose: bool = False) -> bool:
    """Return whether two tensors are equal up to rounding in the dtype of `theirs`, relative to its largest entry."""
    if ours.shape != theirs.shape:
        return False
    tolerance = 1e-4 if theirs.dtype == torch.float32 else 2e-2
    difference = (ours.float() - theirs.float()).abs().max()
    return bool(difference <= (10 if loose else 1) * tolerance * theirs.float().abs().max())


def _refusal(target: "Target", reason: str) -> UserError:
    return UserError(
        f"The target {target.path} of type {target.model_type!r} cannot be used yet: {reason}; choose another target."
    )
