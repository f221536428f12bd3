"""An adapter of low rank (LoRA) that is trained in place of a head's own matrices: kept beside its base, and merged into it.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), section 4.1: W + B A alpha / r. The files are peft's.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import SCHEMA_VERSION
from draftsmith.heads.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, read_weights
from draftsmith.heads.record import what_it_reads
from draftsmith.storage import atomic_directory, write_json
from draftsmith.target.kernels import without_autocast
from draftsmith.target.target import Target

_ORIGINAL, _ADDED, _PEFT = ".parametrizations.weight.original", ".parametrizations.weight.0.", "base_model.model."


@dataclass(frozen=True)
class DraftAdapter:
    """What an adapter is: its rank r, alpha, and the folder and digest of the head that it changes."""

    rank: int
    alpha: float
    base: Path
    digest: str


class _Added(nn.Module):
    """Adds B A alpha / r to a weight [out, in]: as a parametrization, since heads multiply by weights and not only through modules,
    as peft's layers would need."""

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(weight.new_empty(rank, weight.shape[1]))  # [r, in]
        self.lora_B = nn.Parameter(weight.new_zeros(weight.shape[0], rank))  # [out, r]
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = alpha / rank

    def forward(self, weight: Tensor) -> Tensor:
        # With a graph, as the sum is kept for the whole pass, a part of which may need none (XPress's guesses).
        with torch.enable_grad(), without_autocast(weight):
            return _sum(weight, self.lora_A, self.lora_B, self.scale)


def _sum(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return weight + (b @ a) * scale


def adapt(head: DraftHead, adapter: DraftAdapter) -> DraftHead:
    """Freeze `head`, and have an adapter trained on each of its linear layers but those as long as a vocabulary; return it.

    Other weights (a GRU's, codebooks, kernels, experts and their router, norms) stay as they are. It computes the same until the adapter has learned. Raises
    UserError for a head without such layers, for one that tunes its target by an adapter already, and for one that trains embeddings.
    """
    if getattr(head.options, "train_embeddings", False):
        raise UserError(
            f"train.lora_rank is {adapter.rank}, but head.train_embeddings is true, and an adapter leaves embeddings as they are: leave one "
            "of them out."
        )
    tokens = {len(x) for x in (head.draft_vocab,) if x is not None} | {getattr(head.config, "vocab_size", None)}
    layers = [
        one
        for name, one in head.named_modules()
        if isinstance(one, nn.Linear) and "lm_head" not in name
        # A layer may be as long as a draft vocabulary by chance: those that end in one are no matrices for Muon either.
        if not (one.out_features in tokens and any(part in name for part in head.trains.no_muon))
    ]
    if not layers or "tuned" in head.trains.outputs:
        why = "tunes its target by an adapter of its own" if layers else "has no linear layers to adapt"
        raise UserError(f"train.lora_rank is {adapter.rank}, but this {head.method} head {why}: leave it out.")
    head.requires_grad_(False)
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", _Added(layer.weight, adapter.rank, adapter.alpha))
    # Factors are no full matrices, which Muon would orthogonalise.
    head.trains = replace(head.trains, no_muon=(*head.trains.no_muon, "lora_"))
    head.__dict__["adapter"] = adapter
    return head


def adapter_of(head: DraftHead) -> DraftAdapter | None:
    """Return what `adapt` put on a head, None where it trains its own weights."""
    adapter: DraftAdapter | None = head.__dict__.get("adapter")
    return adapter


def merged(tensors: Mapping[str, Tensor], adapter: DraftAdapter) -> dict[str, Tensor]:
    """Return an adapted head's state dict as that of a head with the adapter in its weights."""
    plain = {}
    for name, value in tensors.items():
        if _ADDED in name:
            continue
        if name.endswith(_ORIGINAL):
            name = name.removesuffix(_ORIGINAL)
            a, b = (tensors[f"{name}{_ADDED}lora_{factor}"] for factor in "AB")
            name, value = f"{name}.weight", _sum(value, a, b, adapter.alpha / adapter.rank)
        plain[name] = value
    return plain


def save_adapter(head: DraftHead, folder: Path, target: Target, tensors: Mapping[str, Tensor]) -> None:
    """Write the adapter of a head alone, as peft does, with a config.json that says which head it belongs to.

    tensors: the adapted head's whole state dict.
    """
    from peft import LoraConfig  # here, as heads without an adapter need no peft

    adapter = adapter_of(head)
    assert adapter is not None
    factors = {
        f"{_PEFT}{name.replace(_ADDED, '.')}.weight": value.detach().cpu().contiguous()
        for name, value in tensors.items()
        if _ADDED in name
    }
    modules = sorted({name.removeprefix(_PEFT).rpartition(".lora_")[0] for name in factors})
    with atomic_directory(folder) as temporary:
        config = LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            base_model_name_or_path=str(adapter.base),  # type: ignore[arg-type]
        )
        write_json(temporary / ADAPTER_CONFIG, config.to_dict() | {"target_modules": modules})
        save_file(factors, temporary / ADAPTER_WEIGHTS, {"format": "pt"})
        own = {
            "schema_version": SCHEMA_VERSION,
            "method": head.method,
            "adapter": asdict(adapter) | {"base": str(adapter.base)},
            "options": head.describe()["options"],
            "target": what_it_reads(head, target.identity).to_json(),
        }
        write_json(temporary / CONFIG, own)


def add_adapter(head: DraftHead, folder: Path, adapter: DraftAdapter) -> DraftHead:
    """Return `head` with the adapter in a folder added to its weights. Raises UserError where it does not fit the head."""
    file, tensors = read_weights(folder, next(head.parameters()).device, (ADAPTER_WEIGHTS,))
    remedy = "restore it, or train it again"
    weights = dict(head.named_parameters())
    a_of = {n.removeprefix(_PEFT).removesuffix(".lora_A.weight"): x for n, x in tensors.items() if ".lora_A." in n}
    for name, a in a_of.items():
        weight, b = weights.get(f"{name}.weight"), tensors.get(f"{_PEFT}{name}.lora_B.weight")
        if weight is None or b is None or (b.shape[0], a.shape[-1]) != weight.shape or a.shape[0] != b.shape[-1]:
            raise UserError(f"{file} holds an adapter of {name}, which does not fit the head {adapter.base}: {remedy}.")
        with torch.no_grad():
            weight.data = _sum(weight, a.float(), b.float(), adapter.alpha / adapter.rank)
    if not a_of or 2 * len(a_of) != len(tensors):
        raise UserError(f"{file} holds other tensors than pairs of LoRA's factors: {remedy}.")
    return head
