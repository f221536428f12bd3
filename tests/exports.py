"""Tiny targets and heads to export, with weights that no initial value hides."""

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.heads.base import DraftHead
from draftsmith.heads.eagle1.head import Eagle1Head
from draftsmith.heads.formats.layout import layouts
from draftsmith.heads.hydra.head import HydraHead
from draftsmith.heads.record import read_passport, write_passport
from draftsmith.heads.registry import find_method
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


def sign_again(folder: Path) -> None:
    """Make an export's passport that of the files which are there now, as if it had been exported so."""
    passport = read_passport(folder)
    assert passport is not None
    write_passport(folder, passport)


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


def maker(method: str, vocab: Tensor | None = None, *, drafting: bool = True, **given: Any) -> Callable[..., Any]:
    """Return (target, vocab, **options) -> a shaken head of a method. drafting: in eval mode. given: options that it has unless others
    are named."""

    def make(target: Target, vocab: Tensor | None = vocab, **options: Any) -> Any:
        named = {key: list(value) if isinstance(value, tuple) else value for key, value in (given | options).items()}
        found = find_method(method)
        head = found.build(found.options_class(**named), target, vocab)
        shake(head)
        return head.eval() if drafting else head

    return make


READS = {"layer_ids": (1, 3, 5)}
BLOCK = READS | {"num_layers": 2, "mask_token_id": 3}
make_eagle3 = maker("eagle3", VOCAB, drafting=False, **READS)
make_peagle = maker("peagle", VOCAB, **READS, depths=4, num_hidden_layers=2)
make_eagle1 = maker("eagle1")
make_draft_model = maker("draft_model")
make_dflash = maker("dflash", **BLOCK, block_size=4)
make_jetspec = maker("jetspec", **BLOCK, block_size=4)
make_dflash2 = maker("dflash2", **BLOCK, block_size=4, conv_group_size=8, selector_rank=6, selector_top_k=7)
make_domino = maker("domino", **BLOCK, block_size=4, gru_hidden_dim=6, emb_dim=5)
make_xpress = maker("xpress", **BLOCK, block_size=4, xpress_rank=6, xpress_mlp_hidden=10)
make_medusa = maker("medusa", drafting=False, num_heads=3)
make_mtp = maker("mtp", qk_norm=True)
make_hydra = maker("hydra", drafting=False, num_heads=3)


def make_dspark(*args: Any, **options: Any) -> DraftHead:
    head = maker("dspark", **BLOCK, block_size=3, markov_rank=6)(*args, **options)
    if head.options.confidence_head:
        head.temperatures.copy_(torch.arange(1, 1 + head.options.block_size) / 2)
    return head


PLAIN = {
    "dflash": make_dflash,
    "dflash2": make_dflash2,
    "domino": make_domino,
    "draft_model": make_draft_model,
    "dspark": make_dspark,
    "eagle1": make_eagle1,
    "eagle3": make_eagle3,
    "hydra": make_hydra,
    "jetspec": make_jetspec,
    "medusa": make_medusa,
    "mtp": make_mtp,
    "peagle": make_peagle,
    "xpress": make_xpress,
}
"""A head of each method, as engines serve it."""
