"""Training that starts from a head that exists: the same head at first, and refused where it does not fit the recipe."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import Eagle3Head
from draftsmith.heads.export.export import export_head
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa2 import Medusa2Options
from draftsmith.heads.peagle import PEagleOptions
from draftsmith.heads.registry import methods
from draftsmith.heads.warm_start import adopt_options, restart
from draftsmith.target.target import Target, load_target
from tests import exports
from tests.batches import documents_of, pack
from tests.eval.conformance.test_suite import SPECS, spec
from tests.exports import make_medusa, make_target, sign_again
from tests.helpers import tiny_tokenizer
from tests.models import SMALL_HEADS, tiny_model
from tests.workplace import digests, make_workplace, options

pytestmark = pytest.mark.full

VOCAB = torch.arange(0, 160, 2)


def make_eagle3(target: Target, vocab: torch.Tensor | None = VOCAB, layer_ids=(1, 4), **more) -> Eagle3Head:
    return exports.make_eagle3(target, vocab, layer_ids=layer_ids, **more)


@pytest.mark.parametrize("vocab", [VOCAB, None], ids=["draft vocab", "whole vocab"])
def test_what_the_recipe_leaves_open_is_that_of_the_head_and_training_that_of_the_recipe(vocab):
    target = make_target()
    head = make_eagle3(target, vocab, intermediate_size=48, num_key_value_heads=1, norm_output=True)
    adopted = adopt_options(
        Eagle3Options(norm_output=True, ttt_steps=2, train_lm_head=False), head, target, "runs/first"
    )
    assert (adopted.layer_ids, adopted.intermediate_size, adopted.num_key_value_heads) == ([1, 4], 48, 1)
    assert adopted.draft_vocab_size == (160 if vocab is None else 80)
    again = restart(head, adopted, target)
    assert (again.trains.steps, again.lm_head.weight.requires_grad) == (2, False)
    assert again.embed_tokens.weight.data_ptr() == target.embedding.data_ptr()
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    for a, b in zip(head(batch, 3).steps, again(batch, 3).steps, strict=True):
        assert torch.equal(a.logits, b.logits)


def test_the_same_values_may_be_named():
    target = make_target()
    named = Eagle3Options([1, 4], draft_vocab_size=80, intermediate_size=96, num_attention_heads=4, head_dim=16)
    assert adopt_options(named, make_eagle3(target), target, "x").num_key_value_heads == 2
    whole = make_eagle3(target, None)
    assert adopt_options(Eagle3Options([1, 4], draft_vocab_size=999), whole, target, "x").draft_vocab_size == 999


WIDTH = {"hidden_size": 32, "train_embeddings": True}


@pytest.mark.parametrize(
    ("made", "asked", "words"),
    [
        ({}, Eagle3Options([1, 5]), r"head.layer_ids is \[1, 5\], but .*runs/first\) has \[1, 4\]: set head.layer_ids to"),
        ({}, Eagle3Options(draft_vocab_size=100), "head.draft_vocab_size is 100, but .* has 80"),
        ({}, Eagle3Options(draft_vocab_size=160), "head.draft_vocab_size is 160, but .* has 80"),
        ({}, Eagle3Options(intermediate_size=64), "head.intermediate_size is 64, but .* has 96"),
        ({}, Eagle3Options(norm_output=True), "head.norm_output is true, but .* has false"),
        ({}, Eagle3Options(lm_head_rank=4), "head.lm_head_rank is 4, but .* has null"),
        ({"lm_head_rank": 10}, Eagle3Options(lm_head_rank=4), "head.lm_head_rank is 4, but .* has 10"),
        (WIDTH, Eagle3Options(hidden_size=16, train_embeddings=True), "head.hidden_size is 16, but .* has 32"),
        (WIDTH, Eagle3Options(sliding_window=9), "head.sliding_window is 9, but .* has null"),
        (exports.make_peagle, PEagleOptions(mask_token_id=5, num_hidden_layers=2), "head.mask_token_id is 5, but .* has 0"),
        (exports.make_peagle, PEagleOptions(num_hidden_layers=4), "head.num_hidden_layers is 4, but .* has 2"),
        (make_medusa, MedusaOptions(), r"head\.num_heads is 5, but .* has 3: set head\.num_heads to that"),
        (make_medusa, Medusa2Options(3, 2), r"head.num_layers is 2, but the head that train.warm_start names \(.*\) has 1"),
    ],
)  # fmt: skip
def test_another_value_is_refused(made, asked, words):
    target = make_target()
    head = make_eagle3(target, **made) if isinstance(made, dict) else made(target)
    with pytest.raises(UserError, match=words):
        adopt_options(asked, head, target, "runs/first")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with heads of another shape than its recipe says: a checkpoint, its export and a Medusa head."""
    folder = make_workplace(tmp_path_factory.mktemp("work"))
    target = load_target(str(folder / "target"))
    head = make_eagle3(target, torch.arange(0, target.vocab_size, 3), layer_ids=[1, 3, 5], intermediate_size=48)
    save_head(head, folder / "head", target)
    export_head(head, target, folder / "exported", dtype="float32")
    save_head(make_medusa(target, num_heads=2), folder / "medusa", target)
    return folder


def words(workplace: Path, run: Path, start: Path, *more: str) -> list[str]:
    """Train for a step at a learning rate of 0, without hidden states on disk."""
    settings = {
        "train.warm_start": start,
        "head.layer_ids": "null",
        "head.draft_vocab_size": "null",
        "features.source": "online",
        "answers.max_new_tokens": 6,
        "train.lr": 0,
        "train.muon_lr": 0,
        "train.max_steps": 1,
        "data_dir": workplace / "data",
    }
    return [
        *options(workplace, run),
        *(word for key, value in settings.items() for word in (f"--{key}", str(value))),
        *more,
    ]


@pytest.mark.parametrize("start", ["head", "exported"])
def test_training_starts_from_the_head(
    start: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *words(workplace, run, workplace / start)]) == 0
    said = capsys.readouterr().err
    assert "draft vocab: " in said
    # At a learning rate of 0 nothing is better than the start, which is measured first.
    lines = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["tau"] == lines[1]["tau"]
    assert json.loads((run / "train" / "summary.json").read_text())["best_step"] == 0
    assert "warning: no evaluation was better than that of the head that training started from" in said
    assert "warning: train.warm_start" not in said
    before = load_file(workplace / "head" / "model.safetensors")
    after = load_file(run / "train" / "best" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((run / "train" / "best" / "config.json").read_text())
    assert (config["options"]["ttt_steps"], config["layer_ids"]) == (3, [1, 3, 5])
    # What the head holds counts, not where it lies.
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in (workplace / start).iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    assert main(["train", *words(workplace, run, moved)]) == 0
    assert "train: reusing" in capsys.readouterr().err
    weights = load_file(moved / "model.safetensors")
    save_file(weights | {"norm.weight": weights["norm.weight"] + 1}, moved / "model.safetensors")
    if start == "exported":
        sign_again(moved)
    assert main(["train", *words(workplace, run, moved)]) == 2
    assert "train.warm_start was" in capsys.readouterr().err


def test_a_better_head_takes_the_place_of_the_start(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    learn = ("--train.lr", "3e-3", "--train.max_steps", "12", "--train.optimizer", "adamw", "--train.evaluations", "1")
    target = load_target(str(workplace / "target"))
    save_head(make_eagle3(target, None), tmp_path / "whole", target)
    assert main(["train", *words(workplace, run, tmp_path / "whole", *learn)]) == 0
    lines = [json.loads(line) for line in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["heldout_loss"] < lines[0]["heldout_loss"]
    summary = json.loads((run / "train" / "summary.json").read_text())
    assert summary["best_step"] == (12 if lines[-1]["tau"]["overall"] > lines[0]["tau"]["overall"] else 0)
    assert ("no evaluation was better" in capsys.readouterr().err) == (summary["best_step"] == 0)


def test_all_that_differs_is_named_at_once() -> None:
    target = make_target()
    head = make_eagle3(target, norm_before_residual=True, intermediate_size=48)
    asked = Eagle3Options(intermediate_size=96, ttt_steps=head.trains.steps)
    with pytest.raises(
        UserError, match=r"^head\.\w+ is \w+, head\.\w+ is \w+, but the head that .* to that, or"
    ) as caught:
        adopt_options(asked, head, target, "runs/first")
    for words in (
        "head.norm_before_residual is false",
        "head.intermediate_size is 96",
        "(runs/first) has",
        "48",
        "true",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", [name for name in SPECS if name != "another package's"])
def test_training_goes_on_from_any_head(name: str) -> None:
    """With nothing but the head's own options all tensors are those of the head, ready to be trained."""
    made = spec(name, steps=1)
    head, target = made.head, made.target
    again = restart(head, adopt_options(made.options, head, target, "runs/first"), target)
    ours, theirs = head.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert {n for n, p in head.named_parameters() if p.requires_grad} == {
        n for n, p in again.named_parameters() if p.requires_grad
    }
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    for a, b in zip(head.eval()(batch, 2).steps, again.eval()(batch, 2).steps, strict=True):
        assert torch.equal(a.logits, b.logits)


OTHER_SIZES = {
    "eagle3": {"draft_vocab_size": 60},
    "peagle": {"draft_vocab_size": 60},
    "dflash": {"draft_vocab_size": 60, "block_size": 6},
    "dflash2": {"draft_vocab_size": 60, "block_size": 3},
    "dspark": {"draft_vocab_size": 60, "block_size": 6},
    "jetspec": {"block_size": 6},
    "domino": {"block_size": 3},
    "xpress": {"block_size": 6},
    "medusa": {"num_heads": 5},
    "hydra": {"num_heads": 2},
}


@pytest.mark.parametrize("method", OTHER_SIZES)
def test_a_head_of_another_vocabulary_and_length_keeps_what_both_have(method: str) -> None:
    """Logits of tokens that both vocabularies have, and of steps that both heads make, are those of before."""
    target, options_class = make_target(), methods()[method].options_class
    old_ids = torch.arange(0, 160, 2) if "draft_vocab_size" in OTHER_SIZES[method] else None
    sizes = {} if old_ids is None else {"draft_vocab_size": 80}
    asked = options_class(**SMALL_HEADS[method] | OTHER_SIZES[method])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        head = methods()[method].build(options_class(**SMALL_HEADS[method] | sizes), target, old_ids)
        with torch.no_grad():  # away from the target's rows, which a new head would have as well
            for parameter in head.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    with pytest.raises(UserError, match="start from another head"):
        adopt_options(asked, head, target, "runs/first")
    adopted = adopt_options(asked, head, target, "runs/first", resize=True)
    ids = None if old_ids is None else torch.cat([torch.arange(0, 40, 2), torch.arange(41, 121, 2)])
    again = restart(head, adopted, target, resize=True, draft_vocab=ids)
    assert all(getattr(again.options, key) == value for key, value in OTHER_SIZES[method].items())
    both = slice(None) if ids is None else torch.arange(20)
    if method not in ("dflash", "dflash2", "domino", "dspark", "xpress"):  # whose slots see the length of their block
        batch = pack(target, documents_of(target), head.reads.layer_ids)
        steps = min(head.trains.steps, again.trains.steps)
        for a, b in zip(*(one.eval()(batch, steps).steps for one in (head, again)), strict=True):
            torch.testing.assert_close(a.logits[:, both], b.logits[:, both], atol=1e-5, rtol=1e-5)
    fresh, before, after = (
        methods()[method].build(adopted, target, ids).state_dict(),
        head.state_dict(),
        again.state_dict(),
    )
    kept = [name for name in after if name in before and name != "draft_vocab"]
    assert len(kept) > 3
    for name in kept:
        if before[name].shape == after[name].shape:
            assert torch.equal(before[name], after[name]), name
        elif ids is not None and after[name].shape[0] == len(ids):
            assert torch.equal(before[name][both], after[name][both]), name
            if "markov" not in name:  # which starts at random
                assert torch.equal(after[name][20:], fresh[name][20:]), name
        else:
            corner = tuple(slice(min(sizes)) for sizes in zip(before[name].shape, after[name].shape, strict=True))
            assert before[name].any(), name
            assert torch.equal(before[name][corner], after[name][corner]), name


def test_resizing_that_cannot_be_is_refused() -> None:
    target = make_target()
    for made, asked, words in (
        ({"lm_head_rank": 10}, Eagle3Options(draft_vocab_size=60, lm_head_rank=10), "has a projection of low rank"),
        ({}, Eagle3Options(draft_vocab_size=60, intermediate_size=48), "head.intermediate_size is 48, but"),
    ):
        with pytest.raises(UserError, match=words):
            adopt_options(asked, make_eagle3(target, **made), target, "runs/first", resize=True)


def test_rows_of_tokens_are_told_from_others_of_as_many_and_layers_keep_their_rotation() -> None:
    """A draft vocabulary as large as the hidden size, chosen anew in the same size, in a head of another rotation than the target's."""
    target, ids = make_target(), torch.arange(0, 128, 2)
    head = make_eagle3(target, ids)
    head.config.rope_parameters = {"rope_type": "default", "rope_theta": 777.0}
    base = DraftHead.load.__func__(
        type(head), {**head.describe(), "layer_ids": list(head.reads.layer_ids)}, target, ids
    )
    base.load_state_dict(head.state_dict())
    assert len(ids) == target.hidden_size
    asked = adopt_options(Eagle3Options(draft_vocab_size=64), base, target, "runs/first", resize=True)
    again = restart(base, asked, target, resize=True, draft_vocab=torch.arange(0, 64))
    before, after = base.state_dict(), again.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"draft_vocab", "lm_head.weight"}
    assert torch.equal(before["lm_head.weight"][:32], after["lm_head.weight"][::2])
    assert again.config.rope_parameters["rope_theta"] == 777.0


def test_training_takes_another_vocabulary_to_train_resize(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, more = tmp_path / "run", ["--train.resize", "true", "--head.draft_vocab_size", "200"]
    assert main(["train", *words(workplace, run, workplace / "head", *more)]) == 0
    assert "head.draft_vocab_size " in capsys.readouterr().err
    before, after = (load_file(folder / "model.safetensors") for folder in (workplace / "head", run / "train" / "best"))
    assert after["lm_head.weight"].shape[0] == len(after["draft_vocab"]) == 200
    both = [i for i in after["draft_vocab"].tolist() if i in before["draft_vocab"]]
    assert 20 < len(both) < 200
    rows = ((x["draft_vocab"].tolist().index(i), x["lm_head.weight"]) for x in (before, after) for i in both)
    values = [weight[row] for row, weight in rows]
    assert all(torch.equal(a, b) for a, b in zip(values[: len(both)], values[len(both) :], strict=True))
    assert torch.equal(before["fc.weight"], after["fc.weight"])


def test_more_steps_than_the_heads_window_are_refused() -> None:
    target = make_target()
    head = make_eagle3(target, sliding_window=4, ttt_steps=4)
    assert adopt_options(Eagle3Options(ttt_steps=4), head, target, "runs/first").sliding_window == 4
    with pytest.raises(UserError, match=r"head\.sliding_window is 4, less than the 7 tokens"):
        adopt_options(Eagle3Options(ttt_steps=7), head, target, "runs/first")


def test_a_head_that_tells_no_options_is_refused() -> None:
    target = make_target()
    head = make_eagle3(target)
    head.describe = lambda: {"depth": 2}
    with pytest.raises(UserError, match=r"heads of eagle3 do not tell their options"):
        adopt_options(Eagle3Options(), head, target, "runs/first")


@pytest.mark.parametrize(
    ("start", "more", "said"),
    [
        ("nowhere", [], "train.warm_start: there is no folder"),
        ("recipe.yaml", [], "recipe.yaml is a file: name the folder that holds it"),
        ("", [], "train.warm_start: there is no trained head in"),
        ("medusa", [], "medusa, a head of medusa, but method is eagle3"),
        ("target", [], "is the target itself, which drafts nothing"),
        ("head", ["--head.draft_vocab_size", "200"], "head.draft_vocab_size is 200, but the head that train.warm_start"),
        ("head", ["--head.fc_norm", "true"], "set head.fc_norm to that"),
        ("head", ["--features.source", "store", "--features.layer_ids", "[2,4]"], "features.layer_ids [2, 4] lacks [1, 3, 5]"),
        ("head", ["--features.source", "store", "--features.layer_ids", "[1,3,5,77]"], "features.layer_ids [1, 3, 5, 77] for the target"),
        ("run", [], "which this run makes itself"),
        ("run/export/eagle3", [], "which this run makes itself"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_before_any_work(
    start: str, more: list[str], said: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    if start.startswith("run"):
        save = run / "train" / "best" if start == "run" else tmp_path / start
        save.mkdir(parents=True)
        for file in (workplace / "head").iterdir():
            (save / file.name).write_bytes(file.read_bytes())
    before = digests(tmp_path)
    folder = tmp_path / start if start.startswith("run") else workplace / start
    assert main(["train", *words(workplace, run, folder, "--redo", "train", *more)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftsmith: ")]
    assert said in line
    assert digests(tmp_path) == before


def test_a_head_of_another_target_of_the_same_sizes_is_taken_with_a_warning(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, smaller = tmp_path / "other", tmp_path / "smaller"
    for path, change in ((other, {}), (smaller, {"num_hidden_layers": 7})):
        tiny_model("llama", seed=5, vocab_size=len(tiny_tokenizer()), **change).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    more = ["--data_dir", str(tmp_path / "data"), "--data.limit", "40", "--target.path"]
    start = words(workplace, tmp_path / "run", workplace / "head", *more)
    assert main(["train", *start, str(other)]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning: train.warm_start" in line]
    assert "was made for another target" in line
    assert main(["train", *start, str(smaller), "--output_dir", str(tmp_path / "second")]) == 2
    assert "7 layers" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()


def test_an_export_is_exported_again(workplace: Path, tmp_path: Path) -> None:
    """Of another shape than the recipe says, which does not concern it."""
    layout = ["--export.layout", "eagle3_speculators", "--export.dtype", "float32"]
    for name in ("head", "exported"):
        run = tmp_path / name
        assert main(["export", *options(workplace, run), "--head", str(workplace / name), *layout]) == 0
    first, second = (
        load_file(tmp_path / name / "export" / "eagle3_speculators" / "model.safetensors")
        for name in ("head", "exported")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_plan_needs_no_head(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words(workplace, tmp_path / "run", tmp_path / "not there yet"), "--device", "h100"]) == 0
    said = capsys.readouterr().out
    assert "training:" in said
    assert "those of train.warm_start are not read" in said
