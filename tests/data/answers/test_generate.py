"""Answers by the target: order, seeds, limits, and files cut off anywhere."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.answers import generate
from draftsmith.data.answers.generate import read_answers, regenerate
from draftsmith.data.conversations import templates
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.templates import encode, prepare_prompts
from draftsmith.data.team import Alone
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.target.target import Target
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model

pytestmark = pytest.mark.full

TALK = [
    Conversation(f"c{i}", "chat", ({"role": "user", "content": "why " * (1 + i % 5) + f"{i}?"},)) for i in range(11)
]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()), initializer_range=0.08)
    return Target(model, path="tiny", fingerprint="0")


def answer(
    target: Target, path: Path, batch: int = 2, seed: int = 0, talk: list[Conversation] = TALK, **how: Any
) -> list[dict]:
    prompts = prepare_prompts(tiny_tokenizer(), talk, max_new_tokens=lambda name: 6, max_length=120)
    regenerate(target, tiny_tokenizer(), prompts, path, sampling=Sampling(1.0), seed=seed, batch=batch, **how)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_in_order_and_depend_on_seed_and_id_only(target: Target, tmp_path: Path) -> None:
    rows = answer(target, tmp_path / "a.jsonl")
    assert [row["id"] for row in rows] == [c.id for c in TALK]
    again = answer(target, tmp_path / "b.jsonl", batch=5, talk=TALK[::-1])
    assert {r["id"]: r["output_ids"] for r in again} == {r["id"]: r["output_ids"] for r in rows}
    other = answer(target, tmp_path / "c.jsonl", seed=1)
    assert [r["output_ids"] for r in other] != [r["output_ids"] for r in rows]
    for row in rows:
        assert row["messages"][-1]["role"] == "assistant"
        assert len(row["output_ids"]) <= 6
        assert (row["finish_reason"] == "eos") == (row["output_ids"][-1] in target.eos_ids)
    samples = read_answers(tmp_path / "a.jsonl").samples
    assert [int(s.mask.sum()) for s in samples] == [len(r["output_ids"]) for r in rows]


def test_a_chunk_that_came_before_its_turn_is_not_made_again_by_a_process_that_is_late(
    target: Target, tmp_path: Path
) -> None:
    """Rank 0 has put it in order before this one looks."""
    part, path = tmp_path / "a.jsonl.part-4-8", tmp_path / "a.jsonl"

    class Late(Alone):
        rank, size = 1, 2

        def tell(self, make: Callable[[], Any]) -> Any:
            told = make()
            part.unlink()
            path.write_text("")
            return told

    part.write_text("{}\n")
    answer(target, path, batch=1, talk=TALK[:8], team=Late())
    assert [file.name for file in tmp_path.iterdir() if "part-" in file.name] == []


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.75, 0.99])
def test_a_file_cut_anywhere_is_finished_the_same(target: Target, tmp_path: Path, kept: float) -> None:
    answer(target, tmp_path / "whole.jsonl", batch=1)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    (tmp_path / "cut.jsonl.partial").write_bytes(whole[: int(kept * len(whole))])
    answer(target, tmp_path / "cut.jsonl", batch=1)
    assert (tmp_path / "cut.jsonl").read_bytes() == whole


@pytest.mark.parametrize("stopped", [False, True], ids=["finished before", "cut off before"])
def test_more_prompts_add_to_the_answers(
    stopped: bool, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the one that all the prompts would have given at once; one prompt of the same id now says something else."""
    path, earlier, decoded = tmp_path / "grown.jsonl", tmp_path / "earlier.jsonl", []
    talk = [Conversation("c1", "chat", ({"role": "user", "content": "how"},)), *TALK[6:1:-2]]
    answer(target, earlier, batch=1, talk=talk)
    if stopped:
        earlier = earlier.rename(f"{earlier}.partial")
        with earlier.open("a") as file:
            file.write('{"id": "c0", "sl')

    def counted(target: Target, drafter: object, requests: list, *rest: object) -> object:
        decoded.extend(request.sample_id for request in requests)
        return decode(target, drafter, requests, *rest)

    decode = generate.decode
    monkeypatch.setattr(generate, "decode", counted)
    answer(target, path, batch=1, kept=[earlier, earlier])
    assert sorted(decoded) == sorted({c.id for c in TALK} - {"c2", "c4", "c6"})
    answer(target, tmp_path / "whole.jsonl", batch=1)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_link_in_place_of_earlier_answers_is_refused(target: Target, tmp_path: Path) -> None:
    mine, kept = tmp_path / "mine", tmp_path / "answers.jsonl.partial"
    mine.write_text("not an answer, and no end of line")
    kept.symlink_to(mine)
    with pytest.raises(UserError, match=r"answers\.jsonl\.partial is a link, which this run did not make"):
        answer(target, tmp_path / "new.jsonl", kept=[kept])
    assert mine.read_text() == "not an answer, and no end of line"


def test_prompts_without_room_are_left_out(target: Target) -> None:
    long = Conversation("long", "chat", ({"role": "user", "content": "why " * 200},))
    prompts = prepare_prompts(tiny_tokenizer(), [*TALK, long], max_new_tokens=lambda name: 6, max_length=120)
    assert [p.conversation.id for p in prompts] == [c.id for c in TALK]
    with pytest.raises(
        UserError, match=r"within the 120 tokens that data\.max_length and the target allow: raise data\.max_length"
    ):
        prepare_prompts(tiny_tokenizer(), [long], max_new_tokens=lambda name: 6, max_length=120)


def test_a_prompt_that_cannot_fit_is_left_out_without_making_tokens_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = []
    monkeypatch.setattr(templates, "encode", lambda tokenizer, text: cut.append(len(text)) or encode(tokenizer, text))
    long = Conversation("long", "chat", ({"role": "user", "content": "word " * 100_000},))
    prompts = prepare_prompts(tiny_tokenizer(), [*TALK, long], max_new_tokens=lambda name: 6, max_length=120)
    assert [prompt.conversation.id for prompt in prompts] == [one.id for one in TALK]
    assert max(cut) < 500_000


def test_what_a_turn_holds_beside_its_text_is_written_as_text(target: Target, tmp_path: Path) -> None:
    """Parquet has values that JSON lacks."""
    said = {"role": "user", "content": "why?", "timestamp": datetime(2026, 11, 29, 12)}
    (row,) = answer(target, tmp_path / "a.jsonl", talk=[Conversation("c", "chat", (said,))])
    assert row["messages"][0]["timestamp"] == "2026-11-29 12:00:00"
