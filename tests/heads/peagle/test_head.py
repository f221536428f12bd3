"""P-EAGLE: the training pass against a dense mask in float64, the sample of rows, exports, mistakes."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.peagle import PEagleOptions
from draftsmith.heads.peagle import head as peagle
from draftsmith.heads.peagle.head import PEagleHead, build
from draftsmith.storage import write_json
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.exports import sign_again
from tests.heads import llama_oracle as oracle
from tests.models import make_target

pytestmark = pytest.mark.full

LAYERS = (1, 4, 6)
DEPTHS = 5
SHAPES = {
    "four layers": {},
    "one layer, norms": {"num_hidden_layers": 1, "norm_before_residual": True, "fc_norm": True},
    "a window, its own width": {
        "sliding_window": 6,
        "hidden_size": 32,
        "train_embeddings": True,
        "num_hidden_layers": 2,
    },
}


def make_head(target: Target, seed: int = 0, **options) -> PEagleHead:
    """A head whose every tensor matters: norms away from one, a draft vocabulary with gaps."""
    vocab = torch.arange(0, target.vocab_size, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        given = {"layer_ids": list(LAYERS), "draft_vocab_size": len(vocab), "depths": DEPTHS, "mask_token_id": 4}
        head = build(PEagleOptions(**given | options), target, vocab)
        for name, parameter in head.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return head


def seeded(batch: TrainBatch, seed: int = 0) -> TrainBatch:
    """The batch with a seed per document, told by its length."""
    seeds = torch.zeros_like(batch.ids)
    for row, document in zip(seeds, batch.document, strict=True):
        for number in document[document >= 0].unique():
            row[document == number] = 1000 * seed + int((document == number).sum())
    return replace(batch, seed=seeds)


def by_document(batch: TrainBatch) -> dict[tuple[int, int], slice]:
    """Where each document lies: (row, number) -> its tokens."""
    found = {}
    for b, row in enumerate(batch.document):
        for number in row[row >= 0].unique().tolist():
            place = (row == number).nonzero().flatten()
            found[b, number] = slice(int(place[0]), int(place[-1]) + 1)
    return found


@torch.no_grad()
def dense_logits(head: PEagleHead, ids: Tensor, aux: Tensor, depths: int) -> Tensor:
    """Return [T, K, W] of one document: all rows of all depths at once, what they see as the paper's rule says."""
    T = len(ids)
    anchor, depth = (x.flatten() for x in torch.meshgrid(torch.arange(T), torch.arange(depths), indexing="ij"))
    token = torch.cat([ids[1:], ids.new_zeros(1)])[anchor].where(depth == 0, torch.tensor(head.options.mask_token_id))
    streams = torch.where((depth == 0)[:, None], aux[anchor].double(), head.mask_hidden[0].double())
    q_anchor, q_depth, k_anchor, k_depth = anchor[:, None], depth[:, None], anchor, depth
    sees = ((k_depth == 0) & (q_anchor >= k_anchor)) | ((q_anchor == k_anchor) & (q_depth >= k_depth))
    if head.window is not None:
        sees &= k_anchor + k_depth > q_anchor + q_depth - head.window
    embedded = head.embed_tokens.weight.double()[token]
    out = oracle.run(head, oracle.Rows(embedded, oracle.fuse(head, streams), anchor + depth, sees))
    return oracle.logits(head, out).view(T, depths, -1)


def check_against_dense_mask(head: PEagleHead, batch: TrainBatch) -> None:
    compared = 0
    documents, L = by_document(batch), batch.ids.shape[1]
    tables = {
        key: dense_logits(head, batch.ids[key[0], at], batch.aux[key[0], at], DEPTHS) for key, at in documents.items()
    }
    for step in head(batch, DEPTHS).steps:
        for flat, found in zip(step.rows.tolist(), step.logits, strict=True):
            b, t = divmod(flat, L)
            key = b, int(batch.document[b, t])
            expected = tables[key][t - documents[key].start, step.offset]
            torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)
            compared += 1
    assert compared > 60


@pytest.mark.parametrize("training", [False, True], ids=["all rows", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_training_pass_is_that_of_a_dense_mask(shape, training):
    target = make_target()
    batch = seeded(pack(target, documents_of(target), LAYERS))
    check_against_dense_mask(make_head(target, **SHAPES[shape]).train(training), batch)


LONG = ((40, 60), (90,), (30, 20, 33))


def masks_of(head: PEagleHead, batch: TrainBatch) -> list[Tensor]:
    return list(head.train().supervised(batch))


def check_sample(head: PEagleHead, batch: TrainBatch, masks: list[Tensor]) -> None:
    """As many rows as the rule says, each kept at the depth before, none that would leave the answer or the document."""
    assert len(masks) == DEPTHS
    assert torch.equal(masks[0], supervised_rows(batch, 0))
    for (b, _), at in by_document(batch).items():
        n = int(masks[0][b, at].sum())
        for depth in range(1, DEPTHS):
            pool = masks[depth - 1][b, at] & supervised_rows(batch, depth)[b, at]
            wanted = int((n - depth) * max(head.options.keep**depth, head.options.keep_min)) if n > depth else 0
            assert int(masks[depth][b, at].sum()) == min(wanted, int(pool.sum()))
            assert not bool((masks[depth][b, at] & ~pool).any())


@pytest.mark.parametrize("keep", [0.7, 0.3, 1.0])
def test_the_sample_is_that_of_the_rule(keep):
    target = make_target()
    head, batch = make_head(target, keep=keep), seeded(pack(target, documents_of(target, LONG), LAYERS))
    masks = masks_of(head, batch)
    check_sample(head, batch, masks)
    if keep == 1.0:
        # n - d at most, of rows that a gap in the answer leaves out some of.
        assert all(torch.equal(mask, supervised_rows(batch, d)) for d, mask in enumerate(masks))


def test_every_row_is_drawn_about_as_often():
    target = make_target()
    head, batch = make_head(target), pack(target, documents_of(target, ((60,),)), LAYERS)
    often = sum(masks_of(head, seeded(batch, seed))[1][0].double() for seed in range(200)) / 200
    often = often[supervised_rows(batch, 1)[0]]
    assert float((often - often.mean()).abs().max()) < 5 * (0.25 / 200) ** 0.5


def test_a_whole_vocabulary_need_not_be_named(tmp_path):
    target = make_target()
    head = peagle.build(PEagleOptions(layer_ids=list(LAYERS), depths=3, mask_token_id=4), target, None).eval()
    export_head(head, target, tmp_path / "out", layout="peagle", dtype="float32", num_speculative_tokens=3)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["draft_vocab_size"]
    write_json(tmp_path / "out" / "config.json", config)
    (tmp_path / "out" / "draftsmith.json").unlink()
    assert isinstance(load_head(tmp_path / "out", target), PEagleHead)


@pytest.mark.parametrize(
    ("token", "why"), [(-1, ": it must be from 0"), (160, ", but the target has tokens 0 to 159: choose")]
)
def test_a_mask_token_outside_the_vocabulary_is_one_sentence(token, why):
    with pytest.raises(UserError, match=rf"head\.mask_token_id is {token}{why}") as told:
        make_head(make_target(), mask_token_id=token)
    assert "\n" not in str(told.value)


def test_the_mask_token_that_a_target_offers(tmp_path):
    assert make_head(make_target(), mask_token_id=None).options.mask_token_id == 0, "its padding token"
    target = make_target(pad_token_id=None)
    assert make_head(target, mask_token_id=None).options.mask_token_id == 2, "its end token"
    reserved = {"id": 9, "content": "<|reserved_special_token_0|>", "special": True}
    write_json(tmp_path / "tokenizer.json", {"added_tokens": [reserved]})
    write_json(tmp_path / "tokenizer_config.json", {})
    named = Target(target.model, path="tiny", fingerprint="0", directory=tmp_path)
    assert make_head(named, mask_token_id=None).options.mask_token_id == 9, "one that its tokenizer reserves"
    ends = make_target(pad_token_id=2)
    named = Target(ends.model, path="tiny", fingerprint="0", directory=tmp_path)
    assert make_head(named, mask_token_id=None).options.mask_token_id == 9, "not a padding token that ends texts"
    target = make_target(pad_token_id=None, eos_token_id=None)
    target.model.generation_config.eos_token_id = None
    with pytest.raises(UserError, match="names neither a padding token nor an end token"):
        make_head(target, mask_token_id=None)


def test_keeping_all_rows_leaves_no_least_share():
    with pytest.raises(UserError, match=r"head\.keep_min is 0\.1, but head\.keep is 1"):
        PEagleOptions(keep=1.0, keep_min=0.1)


def test_a_config_without_its_mask_token_is_refused(tmp_path):
    target = make_target()
    export_head(make_head(target), target, tmp_path / "out", layout="peagle", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["mask_token_id"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    sign_again(tmp_path / "out")
    with pytest.raises(UserError, match="says mask_token_id None, but the target has tokens 0 to 159"):
        load_head(tmp_path / "out", target)
    config["pard_token"] = 7
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    sign_again(tmp_path / "out")
    assert load_head(tmp_path / "out", target).options.mask_token_id == 7
