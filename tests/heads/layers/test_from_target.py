"""Embeddings are read louder where they are quieter than states, and exports hold the same head."""

from pathlib import Path

import pytest
import torch

from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle1 import head as eagle1
from draftsmith.heads.export.export import export_head
from draftsmith.heads.files import read_config
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.hydra import head as hydra
from draftsmith.heads.layers.from_target import embedding_scale, fold
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.models import tiny_model


def make_target(quieter: float = 0.05) -> Target:
    target = Target(tiny_model("llama"), path="tiny", fingerprint="0")
    target.model.get_input_embeddings().weight.data.mul_(quieter)
    return target


def make_head(method: str, target: Target) -> DraftHead:
    torch.manual_seed(0)
    head: DraftHead
    if method == "eagle1":
        head = eagle1.build(eagle1.Eagle1Options(), target, None)
    else:
        head = hydra.build(hydra.HydraOptions(num_heads=3, prefix_attention=method == "hydra++"), target, None)
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    return head.eval()


@torch.no_grad()
def test_the_scale_brings_embeddings_to_the_size_of_states() -> None:
    target = make_target()
    scale = embedding_scale(target)
    assert scale == 2 ** round(torch.tensor(scale).log2().item())
    ids = torch.arange(5, 150)[None]
    sizes = [x.square().mean(-1).sqrt().median() for x in (target.forward(ids).last, target.embedding[ids] * scale)]
    assert 0.5 < float(sizes[0] / sizes[1]) < 2
    louder = make_target(1.0)
    assert embedding_scale(louder) < scale


def test_fold_leaves_the_products_as_they_are() -> None:
    weight, state, token = torch.randn(6, 9), torch.randn(4, 3), torch.randn(4, 6)
    ours = torch.cat([state, 8.0 * token], 1) @ weight.T
    torch.testing.assert_close(torch.cat([state, token], 1) @ fold(weight, slice(3, None), 8.0).T, ours)


@pytest.mark.parametrize("method", ["eagle1", "hydra", "hydra++"])
@torch.no_grad()
def test_checkpoints_keep_the_scale_and_exports_multiply_it_in(method: str, tmp_path: Path) -> None:
    target = make_target()
    head = make_head(method, target)
    assert head.embedding_scale == embedding_scale(target) > 4
    save_head(head, tmp_path / "head", target)
    kept = load_head(tmp_path / "head", target).eval()
    assert kept.embedding_scale == head.embedding_scale
    export_head(head, target, tmp_path / "out", dtype="float32")
    served = load_head(tmp_path / "out", target).eval()
    assert served.embedding_scale == 1.0
    assert "token_scale" not in read_config(tmp_path / "out")
    batch = pack(target, documents_of(target), ())
    for ours, same, theirs in zip(head(batch, 3).steps, kept(batch, 3).steps, served(batch, 3).steps, strict=True):
        assert torch.equal(ours.logits, same.logits)
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
