"""P-EAGLE: the training pass against a dense mask in float64, the sample of rows, drafts, trees, exports, mistakes."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.answers import Request, tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree
from draftsmith.errors import UserError
from draftsmith.eval.conformance.suite import CHECKS, Spec, tiny_target
from draftsmith.eval.drafters.system import head_system
from draftsmith.eval.simulate.texts import simulate_generations
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.layers import training_pass
from draftsmith.heads.layers.row_plan import RowPlan
from draftsmith.heads.peagle import head as depth_sample
from draftsmith.heads.peagle import head as peagle
from draftsmith.heads.peagle.drafter import PEagleDrafter
from draftsmith.heads.peagle.head import PEagleHead, build
from draftsmith.heads.peagle.options import PEagleOptions
from draftsmith.heads.warm_start import adopt_options
from draftsmith.storage import write_json
from draftsmith.target.target import Target
from tests.batches import documents_of, pack
from tests.heads import llama_oracle as oracle
from tests.models import tiny_model

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


def make_target(**overrides) -> Target:
    return Target(tiny_model("llama", **overrides), path="models/tiny", fingerprint="abc")


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


def unrotated(patch):
    """Deeper rows stand where their anchor does."""
    real = training_pass.TrainingPass._cos_sin
    patch.setattr(training_pass.TrainingPass, "_cos_sin", lambda self, rows, step=0: real(self, rows))


def leak(patch):
    """Rows see the documents before theirs."""
    real = peagle.plan_rows
    patch.setattr(peagle, "plan_rows", lambda document, rows: real(document.clamp(max=0), rows))


def forgotten(patch):
    """A row does not see the depths between its anchor and itself."""
    real = training_pass._Keys.narrow
    patch.setattr(
        training_pass._Keys,
        "narrow",
        lambda self, kept: replace(real(self, kept), own_k=self.own_k[:0, kept], own_v=self.own_v[:0, kept]),
    )


def wide_window(patch):
    """Deeper rows see as many tokens behind their anchor as the anchor does."""
    patch.setattr(RowPlan, "within", lambda self, window: replace(self, window=None if window is None else 6))


@pytest.mark.parametrize(
    ("mutant", "shape"),
    [
        (unrotated, "four layers"),
        (leak, "four layers"),
        (forgotten, "four layers"),
        (wide_window, "a window, its own width"),
    ],
)
def test_a_broken_training_pass_is_found(mutant, shape, monkeypatch):
    target = make_target()
    head, batch = make_head(target, **SHAPES[shape]).eval(), pack(target, documents_of(target), LAYERS)
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="not close"):
        check_against_dense_mask(head, batch)


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


def test_the_sample_depends_on_the_document_and_its_seed_alone():
    target = make_target()
    head, documents = make_head(target), documents_of(target, LONG)
    packed = seeded(pack(target, documents, LAYERS))
    whole = masks_of(head, packed)
    for (b, number), at in by_document(packed).items():
        alone = seeded(pack(target, [[documents[b][number]]], LAYERS))
        for ours, theirs in zip(whole, masks_of(head, alone), strict=True):
            assert torch.equal(ours[b, at], theirs[0])
    assert all(torch.equal(a, b) for a, b in zip(whole, masks_of(head, packed), strict=True))
    other = masks_of(head, seeded(packed, seed=1))
    assert not torch.equal(whole[1], other[1])
    assert torch.equal(whole[0], other[0])


def test_every_row_is_drawn_about_as_often():
    target = make_target()
    head, batch = make_head(target), pack(target, documents_of(target, ((60,),)), LAYERS)
    often = sum(masks_of(head, seeded(batch, seed))[1][0].double() for seed in range(200)) / 200
    often = often[supervised_rows(batch, 1)[0]]
    assert float((often - often.mean()).abs().max()) < 5 * (0.25 / 200) ** 0.5


def whole_row(patch):
    """The pool is all rows of an answer, gaps or not."""
    real = depth_sample._ranks
    patch.setattr(depth_sample, "_ranks", lambda number, key, count: real(number, torch.rand(len(key)), count))


def by_place(patch):
    """The draw goes by the place in the batch."""
    real = depth_sample.uniforms
    patch.setattr(depth_sample, "uniforms", lambda keys, place, *more: real(keys, torch.arange(len(place)), *more))


def test_a_broken_sample_is_found(monkeypatch):
    whole_row(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_sample_is_that_of_the_rule(0.7)
    monkeypatch.undo()
    by_place(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_sample_depends_on_the_document_and_its_seed_alone()


def test_a_batch_without_supervised_rows_gives_empty_depths():
    target = make_target()
    head, batch = make_head(target).train(), pack(target, documents_of(target), LAYERS)
    batch.mask.fill_(False)
    assert [tuple(s.logits.shape) for s in head(batch, 3).steps] == [(0, len(head.draft_vocab))] * 3


def test_what_is_trained():
    target = make_target()
    head, batch = make_head(target).train(), seeded(pack(target, documents_of(target), LAYERS))
    sum(step.logits.square().sum() for step in head(batch, DEPTHS).steps).backward()
    assert {name for name, p in head.named_parameters() if not p.requires_grad} == {"embed_tokens.weight"}
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters() if p.requires_grad)


def spec(**options) -> Spec:
    given = {"layer_ids": [0, 1, 2], "draft_vocab_size": 48, "depths": 4, "num_hidden_layers": 2}
    return Spec("peagle", PEagleOptions(**given | options), tiny_target(), torch.arange(0, 96, 2))


def last_mask_row(patch):
    """The mask rows read what the last token does."""
    real = PEagleDrafter.start

    def start(self, rows, capacity):
        real(self, rows, capacity)
        self._mask_hidden_1H = self._mask_hidden_1H * 0

    patch.setattr(PEagleDrafter, "start", start)


def unmasked_token(patch):
    """The mask rows read another token than they were trained with."""
    real = PEagleDrafter._parallel

    def parallel(self, state, depth):
        right = self.head.options
        self.head.options = replace(right, mask_token_id=9)
        try:
            return real(self, state, depth)
        finally:
            self.head.options = right

    patch.setattr(PEagleDrafter, "_parallel", parallel)


@pytest.mark.parametrize("mutant", [last_mask_row, unmasked_token])
@pytest.mark.slow
def test_a_broken_drafter_is_found(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=r"differ from the training pass|not the training pass"):
        CHECKS["decoding has the probabilities of training"](spec())


BUSH = StaticTree.of("bush", [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]])


def test_trees_are_lossless_and_simulated_exactly():
    made = spec()
    target, head, asked = made.target, made.head, made.requests[:16]
    static = head_system("peagle", head, 3, 3, tree=BUSH)
    alone = decode_batch(target, TargetAlone(), asked, Sampling()).generations
    found = decode_batch(target, static.make(3), asked, Sampling(), rows=5).generations
    assert [g.output_ids for g in found] == [g.output_ids for g in alone]
    decoded = total([tally_generation(g, 3) for g in found], 3)
    simulated = simulate_generations(target, head, found, Sampling(), 3, tree=BUSH).tallies
    expected = total([t[2] for t in simulated], 3)
    assert decoded.accepted_K[0] > 20
    assert decoded.rounds == pytest.approx(expected.rounds)
    assert decoded.accepted_K.tolist() == pytest.approx(expected.accepted_K.tolist())
    drawn = head_system("peagle", head, 3, 3, tree=BUSH, drawn=True)
    again = [decode_batch(target, drawn.make(3), asked, Sampling(1.0), rows=rows).generations for rows in (1, 5)]
    assert [g.output_ids for g in again[0]] == [g.output_ids for g in again[1]]


def test_longer_prompts_and_short_answers():
    """Rounds that may draft fewer tokens than K, beside rows that may draft all."""
    made = spec()
    asked = [Request.seeded(f"p{i}", "a", tuple(range(3, 5 + 7 * i)), 1 + 3 * i, 0) for i in range(6)]
    alone = decode_batch(made.target, TargetAlone(), asked, Sampling()).generations
    for rows in (1, 3):
        found = decode_batch(made.target, PEagleDrafter(made.head, 5), asked, Sampling(), rows=rows).generations
        assert [g.output_ids for g in found] == [g.output_ids for g in alone]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", layouts_of("peagle"))
def test_exports_come_back_bit_by_bit(layout, shape, tmp_path):
    target = make_target()
    head = make_head(target, **SHAPES[shape]).eval()
    if layout == "peagle_speculators" and head.options.fc_norm:
        with pytest.raises(UserError, match=r"head\.fc_norm, and vLLM leaves it out where it reads this format"):
            export_head(head, target, tmp_path / "out", layout=layout, dtype="float32", num_speculative_tokens=4)
        return
    export_head(head, target, tmp_path / "out", layout=layout, dtype="float32", num_speculative_tokens=4)
    again = load_head(tmp_path / "out", target)
    assert isinstance(again, PEagleHead)
    assert again.options.mask_token_id == 4
    ours, theirs = head.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    batch = pack(target, documents_of(target), LAYERS)
    for a, b in zip(head(batch, 4).steps, again(batch, 4).steps, strict=True):
        assert torch.equal(a.logits, b.logits)


def test_a_whole_vocabulary_need_not_be_named(tmp_path):
    target = make_target()
    head = peagle.build(PEagleOptions(layer_ids=list(LAYERS), depths=3, mask_token_id=4), target, None).eval()
    export_head(head, target, tmp_path / "out", layout="peagle", dtype="float32", num_speculative_tokens=3)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["draft_vocab_size"]
    write_json(tmp_path / "out" / "config.json", config)
    (tmp_path / "out" / "draftsmith.json").unlink()
    assert isinstance(load_head(tmp_path / "out", target), PEagleHead)


def test_what_vllm_reads():
    target = make_target()
    head = make_head(target, num_hidden_layers=2)
    files = convert_head(head, target, layout="peagle", num_speculative_tokens=4)
    said = {key: files.config[key] for key in ("architectures", "mask_token_id", "num_hidden_layers", "norm_output")}
    assert said == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "mask_token_id": 4,
        "num_hidden_layers": 2,
        "norm_output": False,
    }
    assert files.tensors["mask_hidden"].shape == (1, 1, 3 * 64)
    assert {"midlayer.hidden_norm.weight", "layers.1.input_layernorm.weight"} <= files.tensors.keys()
    assert not [name for name in files.tensors if name.startswith("layers.1.hidden_norm")]
    format_of = convert_head(head, target, layout="peagle_speculators", num_speculative_tokens=4).config
    assert format_of["speculators_model_type"] == format_of["speculators_config"]["algorithm"] == "peagle"


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depths": 9}, r"head\.depths is 9: it must be from 2 to 8"),
        # With one depth nothing would train `mask_hidden`.
        ({"depths": 1}, r"head\.depths is 1: it must be from 2 to 8"),
        ({"keep": 0.0}, r"head\.keep is 0\.0"),
        ({"keep_min": 1.5}, r"head\.keep_min is 1\.5"),
        ({"keep": 1.0, "keep_min": 0.1}, r"head\.keep_min is 0\.1, but head\.keep is 1"),
        ({"num_hidden_layers": 0}, r"head\.num_hidden_layers is 0"),
    ],
)
def test_mistakes_in_the_options(options, words):
    with pytest.raises(UserError, match=words):
        PEagleOptions(**options)


def test_a_warm_start_takes_the_heads_mask_token_and_layers():
    target = make_target()
    head = make_head(target, num_hidden_layers=4)
    assert adopt_options(PEagleOptions(depths=3), head, target, "x").mask_token_id == 4
    with pytest.raises(UserError, match=r"head\.mask_token_id is 5, but .* has 4"):
        adopt_options(PEagleOptions(mask_token_id=5), head, target, "x")
    with pytest.raises(UserError, match=r"head\.num_hidden_layers is 2, but .* has 4"):
        adopt_options(PEagleOptions(num_hidden_layers=2), head, target, "x")


def test_a_config_without_its_mask_token_is_refused(tmp_path):
    target = make_target()
    export_head(make_head(target), target, tmp_path / "out", layout="peagle", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["mask_token_id"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="says mask_token_id None, but the target has tokens 0 to 159"):
        load_head(tmp_path / "out", target)
    config["pard_token"] = 7
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert load_head(tmp_path / "out", target).options.mask_token_id == 7
