"""EAGLE-3's embeddings of its own and its output projection of low rank: trained, stored, exported, started from."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import load_head, save_head
from draftsmith.heads.conformance import Spec, run_conformance, tiny_target
from draftsmith.heads.eagle3 import Eagle3Head, Eagle3Options, build
from draftsmith.heads.export import convert_head, export_head, layouts_for
from draftsmith.heads.loss_spec import LossSpec
from draftsmith.heads.losses import head_loss
from draftsmith.heads.low_rank import LowRankLinear
from draftsmith.heads.target import Target
from draftsmith.heads.warm_start import adopt_options, restart
from tests.batches import documents_of, pack
from tests.models import tiny_model

LAYERS = (1, 3, 5)
VOCAB = torch.arange(0, 160, 2)
EMBEDDING = "embed_tokens.weight"


def make_target(dtype: torch.dtype = torch.float32) -> Target:
    return Target(tiny_model("llama").to(dtype), path="models/tiny", fingerprint="abc")


def make_head(target: Target, **options) -> Eagle3Head:
    torch.manual_seed(0)
    chosen = Eagle3Options(list(LAYERS), draft_vocab_size=len(VOCAB), ttt_steps=3, **options)
    return build(chosen, target, VOCAB)


def train(head: Eagle3Head, target: Target, steps: int = 2, lr: float = 1e-2) -> Eagle3Head:
    batch = pack(target, documents_of(target), LAYERS)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr, weight_decay=0.0)
    for _ in range(steps):
        scored = head_loss(head(batch, 3), batch, target.head, head.draft_vocab, LossSpec())
        optimizer.zero_grad()
        scored.loss_sum.div(scored.rows).backward()
        optimizer.step()
    return head


@torch.no_grad()
def logits(head: Eagle3Head, target: Target) -> list[Tensor]:
    return [step.logits for step in head(pack(target, documents_of(target), LAYERS), 3).steps]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("options", [{"train_embeddings": True}, {"lm_head_rank": 6}], ids=str)
def test_conformance(options):
    """Decoded as trained, simulated as decoded, the same alone and in a batch, after a checkpoint, and after an export."""
    vocab = torch.arange(0, 96, 2)
    chosen = Eagle3Options([0, 1, 2], len(vocab), 3, **options)
    run_conformance(Spec("eagle3", chosen, tiny_target(), vocab))


def test_embeddings_are_trained_and_the_targets_are_not():
    target = make_target()
    before = target.embedding.clone()
    shared, own = make_head(target), make_head(target, train_embeddings=True)
    assert same(logits(shared, target), logits(own, target)), "they start as the target's"
    assert not shared.embed_tokens.weight.requires_grad
    train(own, target)
    moved = (own.embed_tokens.weight != before).any(-1)
    read = torch.zeros(160, dtype=torch.bool)
    for row in documents_of(target):
        for ids in row:
            read[ids[1:]] = True
    assert moved.any()
    assert not (moved & ~read).any(), "a token that no row reads has no gradient"
    assert torch.equal(target.embedding, before)


@pytest.mark.parametrize("lr", [1e-2, 1e-6], ids=["much", "less than bf16 can hold"])
def test_trained_embeddings_are_stored_however_little_they_changed(lr, tmp_path):
    target = make_target(torch.bfloat16)
    head = make_head(target, train_embeddings=True)
    assert head.embed_tokens.weight.dtype == torch.float32
    with torch.no_grad():
        head.embed_tokens.weight *= 1 + lr
    save_head(head, tmp_path / "head", target)
    again = load_head(tmp_path / "head", target)
    assert torch.equal(again.embed_tokens.weight, head.embed_tokens.weight)
    assert again.embed_tokens.weight.requires_grad
    for layout in ("eagle3", "eagle3_llama_cpp"):
        export_head(head, target, tmp_path / layout, layout=layout, dtype="float32")
        assert EMBEDDING in load_file(tmp_path / layout / "model.safetensors")


def test_embeddings_that_never_changed_are_the_targets(tmp_path):
    target = make_target()
    head = make_head(target, train_embeddings=True)
    save_head(head, tmp_path / "head", target)
    assert EMBEDDING not in load_file(tmp_path / "head" / "model.safetensors")
    again = load_head(tmp_path / "head", target)
    assert again.embed_tokens.weight.data_ptr() != target.embedding.data_ptr()
    assert EMBEDDING not in convert_head(head, target, layout="eagle3").tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_warm_start_trains_a_copy_of_the_embeddings(dtype):
    target = make_target(dtype)
    before = target.embedding.clone()
    shared = make_head(target)
    options = adopt_options(Eagle3Options(train_embeddings=True), shared, target, "x")
    again = restart(shared, options, target)
    assert again.embed_tokens.weight.dtype == torch.float32
    assert again.embed_tokens.weight.requires_grad
    if dtype == torch.float32:
        assert same(logits(shared, target), logits(again, target))
        train(again, target)
    else:
        with torch.no_grad():
            again.embed_tokens.weight += 1
    assert not torch.equal(again.embed_tokens.weight, before.float())
    assert torch.equal(target.embedding, before)
    frozen = restart(again, adopt_options(Eagle3Options(), again, target, "x"), target)
    assert torch.equal(frozen.embed_tokens.weight, again.embed_tokens.weight), "what it has learnt stays"
    assert not frozen.embed_tokens.weight.requires_grad


def test_low_rank_starts_as_close_to_the_target_as_that_rank_can():
    target = make_target()
    head = make_head(target, lm_head_rank=10)
    assert isinstance(head.lm_head, LowRankLinear)
    assert {n: tuple(p.shape) for n, p in head.lm_head.named_parameters()} == {
        "down.weight": (10, 64),
        "up.weight": (80, 10),
    }
    wanted = target.head.weight[VOCAB]
    u, s, v = torch.linalg.svd(wanted.double(), full_matrices=False)
    best = u[:, :10] * s[:10] @ v[:10]
    torch.testing.assert_close(head.lm_head.product().double(), best, atol=1e-5, rtol=1e-4)
    train(head, target)
    assert all(p.grad.abs().sum() > 0 for p in head.lm_head.parameters())
    assert not any(
        p.requires_grad for p in make_head(target, lm_head_rank=10, train_lm_head=False).lm_head.parameters()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", layouts_for("eagle3"))
def test_low_rank_is_multiplied_out_for_engines(layout, dtype, tmp_path):
    target = make_target()
    head = train(make_head(target, lm_head_rank=10, train_embeddings=True), target)
    export_head(head, target, tmp_path / "out", layout=layout, dtype=dtype, num_speculative_tokens=3)
    assert "lm_head.weight" in convert_head(head, target, layout=layout, num_speculative_tokens=3).tensors, (
        "as preflight asks"
    )
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in tensors if "down" in name and "lm_head" in name]
    product = (head.lm_head.up.weight.double() @ head.lm_head.down.weight.double()).detach()
    wide = torch.float32 if dtype == "float32" else torch.bfloat16
    torch.testing.assert_close(tensors["lm_head.weight"].double(), product, atol=1e-6, rtol=torch.finfo(wide).eps)
    again = load_head(tmp_path / "out", target)
    assert again.options.lm_head_rank is None
    if dtype == "float32":
        for ours, theirs in zip(logits(head, target), logits(again, target), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert isinstance(head.lm_head, LowRankLinear), "the head itself is not changed"


def test_a_warm_start_keeps_the_rank():
    target = make_target()
    head = train(make_head(target, lm_head_rank=10), target)
    again = restart(head, adopt_options(Eagle3Options(), head, target, "x"), target)
    assert same(logits(head, target), logits(again, target))
    with pytest.raises(UserError, match=r"head\.lm_head_rank is 4, but .* has 10"):
        adopt_options(Eagle3Options(lm_head_rank=4), head, target, "x")
    with pytest.raises(UserError, match=r"head\.lm_head_rank is 4, but .* has null"):
        adopt_options(Eagle3Options(lm_head_rank=4), make_head(target), target, "x")


def test_a_rank_that_saves_nothing_is_refused():
    with pytest.raises(UserError, match=r"head\.lm_head_rank is 0"):
        Eagle3Options(lm_head_rank=0)
    with pytest.raises(UserError, match=r"head\.lm_head_rank is 64, but the output projection is 80 by 64"):
        make_head(make_target(), lm_head_rank=64)
