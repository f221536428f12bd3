"""EAGLE-3's shapes: embeddings of its own, an output projection of low rank, several layers, a width of its own, a sliding
window; trained, stored, exported, started from."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.decoder.trees import StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import head_system
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle.fused import LowRankLinear
from draftsmith.heads.eagle3.head import Eagle3Head, Eagle3Options, build
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.warm_start import adopt_options, restart
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.exports import make_peagle
from tests.heads import llama_oracle as oracle
from tests.models import make_target

pytestmark = pytest.mark.full

LAYERS = (1, 3, 5)
VOCAB = torch.arange(0, 160, 2)
EMBEDDING = "embed_tokens.weight"


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
    target = make_target(dtype=torch.bfloat16)
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
    target = make_target(dtype=dtype)
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
@pytest.mark.parametrize("layout", layouts_of("eagle3"))
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


WIDTH = {"hidden_size": 32, "train_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1}
SHAPES = {
    "three layers": {"num_hidden_layers": 3},
    "a width of its own": WIDTH,
    "a window": {"sliding_window": 4},
    "all of them": {**WIDTH, "num_hidden_layers": 2, "sliding_window": 5, "norm_output": True, "fc_norm": True},
}


def norms_that_matter(head: Eagle3Head) -> Eagle3Head:
    for name, parameter in head.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return head


@torch.no_grad()
def dense_steps(head: Eagle3Head, ids: Tensor, aux: Tensor, t: int, steps: int) -> list[Tensor]:
    """The logits of row t of one document at each step, by passes over all rows up to it and what was drafted since: what
    decoding does, written out. Rows of drafted tokens read the last layer's output at their own place."""
    hidden = oracle.fuse(head, aux[: t + 1])
    found = []
    for step in range(steps):
        length = t + 1 + step
        sees = torch.ones(length, length, dtype=torch.bool).tril()
        if head.window is not None:
            sees &= ~torch.ones(length, length, dtype=torch.bool).tril(-head.window)
        embedded = head.embed_tokens.weight.double()[ids[1 : length + 1]]
        out = oracle.run(head, oracle.Rows(embedded, hidden, torch.arange(length), sees))[-1:]
        found.append(oracle.logits(head, out)[0])
        fed = oracle.norm(out, head.norm.weight, head.config.rms_norm_eps) if head.options.norm_output else out
        hidden = torch.cat([hidden, fed])
    return found


def check_against_dense(head: Eagle3Head, target: Target) -> None:
    documents, compared = documents_of(target), 0
    batch = pack(target, documents, LAYERS)
    L = batch.ids.shape[1]
    tables = [dict(zip(s.rows.tolist(), s.logits.detach(), strict=True)) for s in head(batch, 3).steps]
    for flat in supervised_rows(batch, 2).flatten().nonzero().flatten().tolist()[::3]:
        b, at = divmod(flat, L)
        inside = batch.document[b] == batch.document[b, at]
        expected = dense_steps(head, batch.ids[b][inside], batch.aux[b][inside], int(batch.position[b, at]), 3)
        for table, logits_W in zip(tables, expected, strict=True):
            torch.testing.assert_close(table[flat].double(), logits_W, atol=2e-4, rtol=2e-4)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("shape", SHAPES)
def test_the_training_pass_is_that_of_a_dense_mask(shape):
    target = make_target()
    check_against_dense(norms_that_matter(make_head(target, **SHAPES[shape])), target)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"hidden_size": 32},
            r"head\.hidden_size is 32 and the target's is 64, .*: set head\.train_embeddings to true",
        ),
        ({"hidden_size": 32, "train_embeddings": True, "train_lm_head": False}, r"set head\.train_lm_head to true"),
        ({"hidden_size": 30, "train_embeddings": True}, "do not fit a hidden size of 30"),
        ({"lm_head_rank": 64}, r"head\.lm_head_rank is 64, but the output projection is 80 by 64"),
        ({"sliding_window": 2}, r"head\.sliding_window is 2, less than the 3 tokens of a draft"),
    ],
)
def test_shapes_that_cannot_be_are_one_sentence(options, words):
    with pytest.raises(UserError, match=words) as told:
        make_head(make_target(), **options)
    assert "\n" not in str(told.value)


def test_drafts_longer_than_the_window_are_one_sentence():
    target = make_target()
    head = make_head(target, sliding_window=4)
    with pytest.raises(UserError, match=r"Drafts of 5 tokens do not fit into head\.sliding_window 4: draft fewer"):
        head(pack(target, documents_of(target), LAYERS), 5)


def test_engines_are_told_to_draft_what_fits_into_the_window(tmp_path):
    """A longer draft would lose sight of its root, which was neither trained nor measured."""
    target = make_target()
    for K, told in ((7, 4), (3, 3)):
        folder = tmp_path / str(K)
        head = make_head(target, sliding_window=4)
        export_head(head, target, folder, layout="eagle3_speculators", num_speculative_tokens=K)
        proposal = json.loads((folder / "config.json").read_text())["speculators_config"]["proposal_methods"][0]
        assert proposal["speculative_tokens"] == told
        text = (folder / "README.md").read_text()
        assert f"num_speculative_tokens: {told}," in text
    export_head(head, target, tmp_path / "unsaid", layout="eagle3")
    assert "num_speculative_tokens: 4," in (tmp_path / "unsaid" / "README.md").read_text()


@pytest.mark.parametrize("make", [make_head, make_peagle])
def test_a_head_with_a_small_window_is_exported_again(make, tmp_path):
    """What it was trained with is not in the files: the steps that it gets instead are more than its window holds."""
    target = make_target()
    export_head(make(target, sliding_window=5), target, tmp_path / "one")
    again = load_head(tmp_path / "one", target)
    assert again.trains.steps > again.drafts.max_speculative_tokens
    export_head(again, target, tmp_path / "two")
    batch = pack(target, documents_of(target), again.reads.layer_ids)
    for a, b in zip(again(batch, 3).steps, load_head(tmp_path / "two", target)(batch, 3).steps, strict=True):
        assert torch.equal(a.logits, b.logits)


def test_a_recipe_that_asks_for_longer_drafts_gets_what_fits_into_the_window():
    """Found out in the evaluation, the mistake would have cost the training."""
    head = make_head(make_target(), sliding_window=4)
    chain = head_system("eagle3", head, 7, 8)
    assert (chain.num_speculative_tokens, chain.max_k) == (4, 4)
    assert head_system("eagle3", make_head(make_target()), 7, 8).max_k == 8
    with pytest.raises(UserError, match="5 deep but eagle3 drafts 4 tokens at most: take one of depth 4 or less"):
        head_system("eagle3", head, 7, 8, tree=StaticTree.of("deep", [[0] * k for k in range(1, 6)]))
