"""A bundle is bound to the export that it was made with, and says what differs first; near ties are no faults."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.engines.agreement import EngineRound
from draftsmith.eval.parity.bundle import Bundle, ParityPrompt, read_bundle, write_bundle
from draftsmith.eval.parity.diagnose import (
    BONUS,
    OTHER_K,
    OTHER_MODEL,
    QUANTIZED,
    RIGHT,
    SILENT,
    WEIGHTS,
    Seen,
    diagnose,
    not_told,
)

# Two rounds: one of two drafted tokens is accepted, then none.
PROMPT = ParityPrompt(
    *("p", "chat", None, (1, 5), 8, (10, 11, 12, 13, 14, 15), 4, False),
    margins=(0.5, 0.5, 0.00001, 0.5, 0.5, 0.5),
    target_top=(((10, 3.0), (20, 2.5)), ((11, 3.0), (21, 2.5)), ((12, 3.0), (22, 2.9)), ((13, 3.0), (23, 2.0))),
    draft_top=(((11, 1.0),), ((30, 1.0),)),
    draft_margins=((0.4, 0.4), (0.00002, 0.4)),
    rounds=((1, 11, 30), (0, 31, 32)),
)
BUNDLE = Bundle(
    *("0", "eagle3", "eagle3", 2, "models/t", "f", "float32", (2,), 1e-4, {}, (PROMPT,)),
    faults={"layer + 1": (((0, 40, 41), (0, 42, 43), (0, 44, 45)),)},
    unseen=(),
)
SEEN = Seen("p", PROMPT.answer_ids, (EngineRound((11, 30), 1), EngineRound((31, 32), 0)))


def export(folder: Path) -> Path:
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(b"weights")
    write_bundle(folder, BUNDLE)
    return folder


def test_a_bundle_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert replace(read_bundle(export(tmp_path)), files={}) == BUNDLE


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("parity/bundle.json", ('"prompt_ids":[1,5]', '"prompt_ids":[1,6]'), "not as it was written"),
        ("parity/bundle.json", ('{"draftsmith"', '["draftsmith"'), "is not JSON"),
        ("parity/bundle.json", ('"schema_version":1', '"schema_version":9'), "not as it was written|schema"),
        ("config.json", ("1", "2"), r"config\.json is not the file"),
        ("model.safetensors", ("weights", "weighty"), r"model\.safetensors is not the file"),
    ],
)
def test_a_changed_byte_is_refused(file: str, change: tuple[str, str], words: str, tmp_path: Path) -> None:
    path = export(tmp_path) / file
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(UserError, match=words):
        read_bundle(tmp_path)


def test_an_older_export_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no parity/bundle\.json.*--redo export"):
        read_bundle(tmp_path)


def rounds(*pairs: tuple[tuple[int, ...], int]) -> tuple[EngineRound, ...]:
    return tuple(EngineRound(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("seen", "causes", "ties"),
    [
        (SEEN, (), 0),
        # A near tie of the target, and one of the draft.
        (replace(SEEN, output_ids=(10, 11, 22, 13)), (QUANTIZED,), 1),
        (replace(SEEN, rounds=rounds(((11, 30), 1), ((99, 32), 0))), (), 1),
        (replace(SEEN, output_ids=(10, 11, 12, 23)), (QUANTIZED, OTHER_MODEL), 0),
        (replace(SEEN, output_ids=(99, 11, 12, 13)), (OTHER_MODEL,), 0),
        (replace(SEEN, rounds=()), (SILENT,), 0),
        (replace(SEEN, rounds=rounds(((40, 41), 0), ((42, 43), 0), ((44, 45), 0))), ("layer + 1",), 0),
        # Where tokens are not told, other weights would be accepted as rarely.
        (replace(SEEN, rounds=None, drafted=6, accepted=0), ("layer + 1", WEIGHTS), 0),
        (replace(SEEN, rounds=rounds(((11, 30), 2), ((31, 32), 1))), (BONUS,), 0),
        (replace(SEEN, rounds=rounds(((11, 30, 1, 1, 1), 1), ((31, 32, 1, 1, 1), 0))), (OTHER_K,), 0),
        (replace(SEEN, prompt_tokens=7), ("template",), 0),
        (replace(SEEN, prompt_ids=(1, 6), prompt_tokens=2), ("template",), 0),
        (replace(SEEN, output_ids=(10, 11)), ("end of text",), 0),
    ],
)
def test_the_first_difference_is_named(seen: Seen, causes: tuple[str, ...], ties: int) -> None:
    verdict = diagnose(BUNDLE, [seen])
    assert (verdict.causes, len(verdict.ties)) == (causes, ties)
    assert verdict.right == (not causes)
    assert verdict.sentence.startswith(RIGHT if not causes else "wrong in")


def test_a_bundle_is_json_of_bounded_size(tmp_path: Path) -> None:
    assert json.loads((export(tmp_path) / "parity" / "bundle.json").read_text())["num_speculative_tokens"] == 2


def test_what_looks_the_same_is_said_though_another_prompt_left_at_a_near_tie() -> None:
    """Which tells nothing of a fault, either way."""
    faults = {"layer + 1": BUNDLE.faults["layer + 1"] * 2, "half precision": (PROMPT.rounds,) * 2}
    bundle = replace(BUNDLE, prompts=(PROMPT, replace(PROMPT, id="q")), faults=faults)
    left = Seen("q", (10, 11, 22, 13, 14, 15), (EngineRound((11, 30), 1), EngineRound((13, 14), 2)))
    assert diagnose(bundle, [SEEN, left]).right
    assert not_told(bundle, [SEEN, replace(SEEN, id="q")]) == ("half precision",)
    assert not_told(bundle, [SEEN, left]) == ("half precision",)
    assert not_told(bundle, [left, replace(left, id="q")]) == ("layer + 1", "half precision")


@pytest.mark.parametrize(("wrong", "causes"), [(0, ()), (1, ()), (2, ("layer + 1",))])
def test_near_ties_are_none_where_a_fault_gives_all_that_is_told(wrong: int, causes: tuple[str, ...]) -> None:
    """In bf16 hardly an answer is without a near tie: sums that are a fault's own on several prompts are that fault."""
    prompts = tuple(replace(PROMPT, id=str(i)) for i in range(5))
    own = ((0, 11, 30), (1, 12, 31), (0, 14, 32))  # of three rounds, one accepted
    faults = {"layer + 1": tuple(own if i < wrong else PROMPT.rounds for i in range(5)), "another": (own,) * 5}
    bundle = replace(BUNDLE, prompts=prompts, faults=faults)
    seen = [Seen(str(i), PROMPT.answer_ids, None, 6 if i < wrong else 4, 1) for i in range(5)]
    verdict = diagnose(bundle, seen)
    assert verdict.causes == causes
    assert len(verdict.ties) == (0 if causes else wrong)
    # What nothing foretells stays a near tie.
    assert diagnose(replace(bundle, faults={"another": (own,) * 5}), seen).right
