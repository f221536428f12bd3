"""The stage of training: what it says of the draft vocabulary and of heads that learned nothing, and what runs' fingerprints are made of,
which is what it was when they were made."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from draftsmith.cli.main import main
from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.templates import Prompt, prepare_prompts
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.fields import LATER, fingerprint_fields
from draftsmith.heads.vocab import Coverage
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.record import flat_inputs
from draftsmith.recipe.schema import AnswersSpec, DataSpec, Recipe
from draftsmith.stages import data, training
from draftsmith.stages.data import answers_stage
from draftsmith.stages.evaluation import NOT_MEASURED
from draftsmith.stages.session import Session
from draftsmith.stages.training import Start, _with_equal_batch, split_samples, train_inputs, warn_of_untaught
from draftsmith.target.target import load_target
from draftsmith.train.checkpoints import window_of
from tests.eval.engines.fake_server import Engine, serving
from tests.eval.training.test_history import line, make_run
from tests.workplace import make_workplace, options


def make_session(run: Path, head: Path | None = None) -> Any:
    said: list[str] = []
    return SimpleNamespace(recipe=SimpleNamespace(run_dir=run), named_head=head, warn=said.append, said=said)


def test_a_head_that_learned_nothing_is_said_before_decoding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the head that is measured; a log that cannot be read stops nothing."""
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    (bad / "train" / "metrics.jsonl").write_text(json.dumps(line(10, 1.01, heldout_accuracy=[0.12])) + "\n")
    for session, nothing in (
        (make_session(good), False),
        (make_session(bad), True),
        (make_session(good, head=bad), True),
        (make_session(bad, head=good), False),
        (make_session(tmp_path / "none"), False),
    ):
        warn_of_untaught(session)
        assert ["learned nothing" in text for text in session.said] == [True] * nothing
    (bad / "train" / "metrics.jsonl").write_text('{"tau": }\n')
    warn_of_untaught(session := make_session(bad))
    assert session.said == []
    assert "warning: " in capsys.readouterr().err


def test_the_head_of_a_training_that_was_not_finished_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "train" / "summary.json").unlink()
    warn_of_untaught(session := make_session(run))
    (said,) = session.said
    assert "the training of this head was not finished: its last evaluation is of step" in said


@pytest.mark.parametrize(("heldout", "answers", "said"), [(30, "abc", True), (20, "abc", False), (30, "other", False)])
def test_answers_that_a_warm_start_has_learned_are_not_held_out_in_silence(
    heldout: int, answers: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (best := tmp_path / "run" / "train" / "best").mkdir(parents=True)
    record = {"train": {"inputs": {"answers": "abc", "data.heldout": 20}, "facts": {}}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    monkeypatch.setattr(training, "warm_folder", lambda recipe: best)
    session = make_session(tmp_path / "new")
    session.recipe.data = SimpleNamespace(heldout=heldout)
    session.upstream = lambda stage: answers
    training._warn_of_learned_heldout(session)
    assert ["kept out 20 of the same answers and learned the others" in text for text in session.said] == [True] * said


@pytest.mark.parametrize(
    ("training_share", "chosen", "fix"),
    [
        (1.0, True, "chosen from more answers"),
        (0.9, True, "raise head.draft_vocab_size."),
        (1.0, False, "train a new head"),
    ],
)
def test_low_coverage_of_held_out_answers_is_a_warning(
    training_share: float, chosen: bool, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    covered = Coverage(training_share, 0.9, {"chat": 0.99, "code": 0.8})
    training._say_coverage(covered, 30, 100, chosen=chosen)
    first, *warnings = capsys.readouterr().err.splitlines()
    assert "30 of 100 tokens cover 90.00% of the held-out answers (chat 99.0%, code 80.0%)" in first
    assert len(warnings) == 2
    assert all(fix in warning for warning in warnings)


def test_what_run_json_keeps() -> None:
    start = Start(SimpleNamespace(), [0, 2, 3], [1], Coverage(1.0, 0.9, {"chat": 0.9}), 77)  # type: ignore[arg-type]
    covered = {"training": 1.0, "heldout": 0.9, "heldout_by_slice": {"chat": 0.9}}
    assert start.facts() == {"answers": 3, "heldout_answers": 1, "longest": 77, "coverage": covered}


ROOT = Path(__file__).resolve().parents[2]
MADE = json.loads((ROOT / "tests" / "fixtures" / "fingerprints.json").read_text())
"""Options of recipes, and what the fingerprints of their stages held when runs were made with them."""


def trained(recipe: Recipe) -> dict[str, Any]:
    target = SimpleNamespace(default_layer_ids=lambda: (2, 4, 6))
    session = SimpleNamespace(recipe=recipe, upstream=lambda stage: stage, target=target, head_options=recipe.head)
    return train_inputs(cast(Session, session))


@pytest.mark.parametrize("made", MADE, ids=lambda made: " ".join(made["options"][1::2])[:40])
def test_fingerprints_hold_what_they_held(made: dict[str, Any]) -> None:
    recipe = parse_recipe(made["options"])
    found = {
        "answers": fingerprint_fields(recipe.answers),
        "train": trained(recipe),
        "evaluate": fingerprint_fields(recipe.evaluate, NOT_MEASURED),
        "export": fingerprint_fields(recipe.export, ["layout"]),
    }
    assert {stage: flat_inputs(inputs) for stage, inputs in found.items()} == {k: made[k] for k in found}


def test_dashboards_make_no_stage_again() -> None:
    tracking = ["--tracking.backends", "[wandb, mlflow]", "--tracking.group", "g", "--tracking.artifacts", "all"]
    plain, tracked = parse_recipe([]), parse_recipe(tracking)
    assert plain.tracking != tracked.tracking
    assert trained(plain) == trained(tracked)
    sections = [field for field in vars(plain) if field != "tracking"]
    assert [getattr(plain, name) for name in sections] == [getattr(tracked, name) for name in sections]


@dataclass(frozen=True)
class Inner:
    old: int = 1
    new: list[int] = field(default_factory=list, metadata=LATER)


@dataclass(frozen=True)
class Section:
    inner: Inner = Inner()
    several: list[Inner] = field(default_factory=lambda: [Inner()])
    scale: float = field(default=0.5, metadata=LATER)


@dataclass(frozen=True)
class Heir(Section):
    ALWAYS_IN_FINGERPRINT: ClassVar = frozenset({"scale"})


def test_later_fields_are_left_out_at_their_defaults_alone() -> None:
    assert fingerprint_fields(Section()) == {"inner": {"old": 1}, "several": [{"old": 1}]}
    changed = Section(Inner(2, [3]), [Inner(new=[4])], 0.25)
    expected = {"inner": {"old": 2, "new": [3]}, "several": [{"old": 1, "new": [4]}], "scale": 0.25}
    assert fingerprint_fields(changed) == expected
    assert fingerprint_fields(changed, ["several", "scale"]) == {"inner": {"old": 2, "new": [3]}}
    assert fingerprint_fields(Heir())["scale"] == 0.5


@pytest.mark.parametrize(
    ("processes", "accumulation", "same"), [(2, 4, True), (1, 8, True), (8, 1, True), (2, 8, False), (1, 4, False)]
)
def test_processes_times_accumulation_is_what_a_resumed_training_depends_on(
    processes: int, accumulation: int, same: bool, tmp_path: Path
) -> None:
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "DONE").write_text("")
    (tmp_path / "step_5" / "progress.json").write_text('{"step": 5, "window": 8}')
    session = SimpleNamespace(
        processes=processes,
        recipe=SimpleNamespace(train=SimpleNamespace(accumulation=accumulation)),
        run=SimpleNamespace(record=lambda stage: SimpleNamespace(inputs={"train.accumulation": 8})),
    )
    inputs = {"train": {"accumulation": accumulation, "lr": 1.0}}
    found = _with_equal_batch(cast(Session, session), inputs, tmp_path)
    assert found == {"train": {"accumulation": 8 if same else accumulation, "lr": 1.0}}


@pytest.mark.full
def test_what_answers_were_warned_of_is_warned_of_by_a_run_that_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is the command that evaluates what its processes made."""

    def doubtful(*given: Any, warn: Any, **named: Any) -> list[Prompt]:
        warn("prompts are read without")
        return prepare_prompts(*given, warn=warn, **named)

    monkeypatch.setattr(data, "prepare_prompts", doubtful)
    words = [*options(make_workplace(tmp_path), tmp_path / "run"), "--answers.max_new_tokens", "2", "--data.limit", "2"]
    making, taking = (Session(parse_recipe(words)) for _ in range(2))
    making.warn("about something else")
    answers_stage(making)
    answers_stage(taking)
    assert taking.warnings == ["prompts are read without"]


def test_a_damaged_checkpoint_does_not_say_how_a_training_goes_on(tmp_path: Path) -> None:
    for step, text in ((1, '{"step": 1, "window": 8}'), (2, '{"step": 2, "win')):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "DONE").write_text("")
        (tmp_path / f"step_{step}" / "progress.json").write_text(text)
    assert window_of(tmp_path) == 8


def test_servers_are_asked_where_answers_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though finished ones are there, also where they were changed since."""
    asked: list[str] = []

    def serve(url: str, names: list[str]) -> None:
        asked.append(url)
        raise UserError("nobody is there")

    folder = make_workplace(tmp_path)
    monkeypatch.setattr(data, "AnswerServer", serve)
    words = [*options(folder, tmp_path / "run"), "--answers.servers", '["http://x"]']
    assert main(["regenerate", *words[:-2]]) == 0
    assert main(["regenerate", *words]) == 0
    (tmp_path / "run" / "answers.jsonl").write_text("changed\n")
    assert main(["regenerate", *words, "--redo", "answers"]) == 2
    assert asked == ["http://x"]


@pytest.mark.full
def test_each_server_is_tested_by_answers_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever they stand, and behind answers that the target made here."""
    folder = make_workplace(tmp_path)
    target = load_target(str(folder / "target"))

    def reply(asked: dict[str, Any], hotter: float) -> tuple[int, Any]:
        request = Request.seeded(str(asked["prompt"]), "chat", tuple(asked["prompt"]), asked["max_tokens"], 1)
        (answer,) = decode(target, TargetAlone(), [request], Sampling(asked["temperature"] + hotter), 1)
        reason = "stop" if answer.finish_reason == "eos" else "length"
        return 200, {"choices": [{"token_ids": answer.output_ids, "finish_reason": reason}]}

    words = [*options(folder, tmp_path / "run"), "--answers.temperature", "0.5", "--answers.max_new_tokens", "24"]
    assert main(["regenerate", *words, "--data.limit", "40"]) == 0
    engines = Engine(reply=partial(reply, hotter=0.0)), Engine(reply=partial(reply, hotter=2.0))
    with serving(engines[0]) as right, serving(engines[1]) as wrong:
        capsys.readouterr()
        served = ["--answers.served_name", "served", "--answers.servers", json.dumps([right, wrong])]
        assert main(["regenerate", *words, *served]) == 0
    told = capsys.readouterr().err
    assert len(engines[0].asked) + len(engines[1].asked) == 40
    assert f"answers: those of {right} are samples of the target" in told
    assert f"warning: the answers of {wrong} are not the target's own" in told


def test_the_tokenizer_s_digest_is_the_same_before_and_after_a_text(tmp_path: Path) -> None:
    """Many fine-tuned targets are saved with truncation, which ends with the first text that is tokenized."""
    folder = make_workplace(tmp_path)
    path = folder / "target" / "tokenizer.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | {"truncation": {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}}))  # fmt: skip
    session = Session(parse_recipe(options(folder, tmp_path / "run"), "draftsmith train"))
    before = session.tokenizer_digest
    session.tokenizer("a text", add_special_tokens=False)
    del session.tokenizer_digest
    assert session.tokenizer_digest == before
    path.write_text(json.dumps(plain))
    assert Session(session.recipe).tokenizer_digest == before


def test_requests_of_a_chat_are_held_out_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the turns before it, and its answers are learned with them."""
    rows = list[Conversation]()
    for chat in range(12):
        said = [{"role": role, "content": f"{chat}.{i} {role}"} for i in range(4) for role in ("user", "assistant")]
        rows += [Conversation(f"log-{chat}-{n}", "chat", tuple(said[: 2 * n])) for n in (1, 2, 3, 4)]
    rows.append(Conversation("prompt", "chat", ({"role": "user", "content": "0.0 user"},)))
    samples = [Tokenized(torch.arange(3), torch.tensor([0, 1, 1]), row.id, "chat") for row in rows]
    for regenerate in (False, True):
        recipe = Recipe(data=DataSpec(heldout=8), answers=AnswersSpec(regenerate=regenerate))
        train, heldout = split_samples(cast(Any, SimpleNamespace(recipe=recipe, conversations=rows)), samples)
        chats = [{rows[i].id.rpartition("-")[0] for i in part} for part in (train, heldout)]
        assert len(heldout) in (8, 9)  # with the prompt, which begins a chat
        assert not chats[0] & chats[1]
        warned = "36 of 49 rows begin as another one up to its first answer" in capsys.readouterr().err
        assert warned == (not regenerate)
