"""Tiny targets and heads to export, with weights that no initial value hides."""

import torch
from models import tiny_model
from torch import Tensor

from draftsmith.heads import eagle1, eagle3, medusa
from draftsmith.heads.eagle1 import Eagle1Head, Eagle1Options
from draftsmith.heads.eagle3 import Eagle3Head, Eagle3Options
from draftsmith.heads.medusa import MedusaHead, MedusaOptions
from draftsmith.heads.target import Target

VOCAB = torch.tensor([0, 2, 3, 7, 50, 51, 52, 100, 159])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_target(**overrides) -> Target:
    return Target(tiny_model("llama", **overrides), path="models/tiny", fingerprint="abc")


def shake(head: torch.nn.Module) -> None:
    """Random weights, norms around one."""
    torch.manual_seed(0)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)


def make_eagle3(
    target: Target, vocab: Tensor | None = VOCAB, layer_ids: tuple[int, ...] = (1, 3, 5), **options
) -> Eagle3Head:
    head = eagle3.build(Eagle3Options(layer_ids=list(layer_ids), **options), target, vocab)
    shake(head)
    return head


def make_eagle1(target: Target, **options) -> Eagle1Head:
    head = eagle1.build(Eagle1Options(**options), target, None)
    shake(head)
    return head.eval()


def make_medusa(target: Target, **options) -> MedusaHead:
    head = medusa.build(MedusaOptions(**{"num_heads": 3, **options}), target, None)
    shake(head)
    return head
