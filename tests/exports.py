"""Tiny targets and heads to export, with weights that no initial value hides."""

import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.base import DraftHead
from draftsmith.heads.dflash import head as dflash
from draftsmith.heads.dflash.head import DFlashHead, DFlashOptions
from draftsmith.heads.draft_model import head as draft_lm
from draftsmith.heads.draft_model.head import DraftLmHead, DraftLmOptions
from draftsmith.heads.dspark import head as dspark
from draftsmith.heads.dspark.head import DSparkHead, DSparkOptions
from draftsmith.heads.eagle1 import head as eagle1
from draftsmith.heads.eagle1.head import Eagle1Head, Eagle1Options
from draftsmith.heads.eagle3 import head as eagle3
from draftsmith.heads.eagle3.head import Eagle3Head, Eagle3Options
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.hydra import head as hydra
from draftsmith.heads.hydra.head import HydraHead, HydraOptions
from draftsmith.heads.medusa import head as medusa
from draftsmith.heads.medusa.head import MedusaHead, MedusaOptions
from draftsmith.heads.peagle import head as peagle
from draftsmith.heads.peagle.head import PEagleHead, PEagleOptions
from draftsmith.target.target import Target
from tests.models import tiny_model

VOCAB = torch.tensor([0, 2, 3, 7, 50, 51, 52, 100, 159])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_target(fingerprint: str = "abc", **overrides) -> Target:
    return Target(tiny_model("llama", **overrides), path="models/tiny", fingerprint=fingerprint)


def replace_layout(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    """Put a layout with other parts in the place of the one of that name."""
    module = import_module(f"draftsmith.heads.{layouts()[name].method}.formats")
    changed = [replace(one, **changes) if one.name == name else one for one in module.LAYOUTS]
    monkeypatch.setattr(module, "LAYOUTS", tuple(changed))


def shake(head: torch.nn.Module) -> None:
    """Random weights, norms around one."""
    torch.manual_seed(0)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)


def folded_state(head: DraftHead, again: DraftHead) -> dict[str, Tensor]:
    """The state of `head` as `again` must hold it, bit for bit: what a head multiplies embeddings by before it reads them
    beside states is a power of two, and in the matrices of an export."""
    state = {name: value.clone() for name, value in head.state_dict().items()}
    if isinstance(head, Eagle1Head | HydraHead) and isinstance(again, type(head)):
        H = head.embed_tokens.embedding_dim
        tokens = slice(H) if isinstance(head, Eagle1Head) else slice(H, None)
        for name in state:
            if re.fullmatch(r"fc\.weight|hydra_mlp\.\d+\.0\.(linear|res_connection)\.weight", name):
                state[name][:, tokens] *= head.embedding_scale / again.embedding_scale
    return state


def make_eagle3(
    target: Target, vocab: Tensor | None = VOCAB, layer_ids: tuple[int, ...] = (1, 3, 5), **options
) -> Eagle3Head:
    head = eagle3.build(Eagle3Options(layer_ids=list(layer_ids), **options), target, vocab)
    shake(head)
    return head


def make_peagle(
    target: Target, vocab: Tensor | None = VOCAB, layer_ids: tuple[int, ...] = (1, 3, 5), **options
) -> PEagleHead:
    given = {"layer_ids": list(layer_ids), "depths": 4, "num_hidden_layers": 2}
    head = peagle.build(PEagleOptions(**given | options), target, vocab)
    shake(head)
    return head.eval()


def make_eagle1(target: Target, **options) -> Eagle1Head:
    head = eagle1.build(Eagle1Options(**options), target, None)
    shake(head)
    return head.eval()


def make_draft_model(target: Target, **options) -> DraftLmHead:
    head = draft_lm.build(DraftLmOptions(**options), target, None)
    shake(head)
    return head.eval()


def make_dflash(target: Target, vocab: Tensor | None = None, **options) -> DFlashHead:
    given = {"layer_ids": [1, 3, 5], "block_size": 4, "num_layers": 2, "mask_token_id": 3}
    head = dflash.build(DFlashOptions(**given | options), target, vocab)
    shake(head)
    return head.eval()


def make_dspark(target: Target, vocab: Tensor | None = None, **options) -> DSparkHead:
    given = {"layer_ids": [1, 3, 5], "block_size": 3, "num_layers": 2, "mask_token_id": 3, "markov_rank": 6}
    head = dspark.build(DSparkOptions(**given | options), target, vocab)
    shake(head)
    if head.options.confidence_head:
        head.temperatures.copy_(torch.arange(1, 1 + head.options.block_size) / 2)
    return head.eval()


def make_medusa(target: Target, **options) -> MedusaHead:
    head = medusa.build(MedusaOptions(**{"num_heads": 3, **options}), target, None)
    shake(head)
    return head


def make_hydra(target: Target, **options) -> HydraHead:
    head = hydra.build(HydraOptions(**{"num_heads": 3, **options}), target, None)
    shake(head)
    return head


PLAIN = {
    "dflash": make_dflash,
    "draft_model": make_draft_model,
    "dspark": make_dspark,
    "eagle1": make_eagle1,
    "eagle3": make_eagle3,
    "hydra": make_hydra,
    "medusa": make_medusa,
    "peagle": make_peagle,
}
"""A head of each method, as engines serve it."""
