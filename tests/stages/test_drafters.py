"""The baselines and the drafters of an evaluation: what is made of a recipe, and what is refused in a sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.cli.main import main
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.decoder.drafters.lookahead import Lookahead
from draftsmith.decoder.drafters.suffix_decoding import SuffixRules
from draftsmith.decoder.drafters.texts import PromptLookup
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import SystemUnderTest, with_window
from draftsmith.heads.base import DraftHead
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import build as build_eagle
from draftsmith.heads.formats.recognise import head_digest, load_head
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import build as build_medusa
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.drafters import (
    at_temperature,
    check_named_drafters,
    load_compared,
    select_drafters,
    with_records,
)
from draftsmith.stages.session import Session
from draftsmith.storage import fingerprint, sha256_file
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model
from tests.workplace import fails, make_workplace, options, save_untrained

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature with a draft model of the same tokenizer, a padded one, and one with another token."""
    folder = make_workplace(tmp_path_factory.mktemp("baselines"))
    for name, extra, padding, context in (
        ("small", 0, 0, 256),
        ("padded", 0, 24, 256),
        ("short", 0, 0, 64),
        ("other", 1, 1, 256),
    ):
        tokenizer = tiny_tokenizer()
        size = len(tokenizer)
        tokenizer.add_tokens([f"new{i}" for i in range(extra)])
        model = tiny_model("llama", num_hidden_layers=2, vocab_size=size + padding, max_position_embeddings=context)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def session(workplace: Path) -> Session:
    return Session(parse_recipe(options(workplace, workplace / "run")))


@pytest.fixture(scope="module")
def heads(session: Session) -> dict[str, DraftHead]:
    torch.manual_seed(0)
    eagle = build_eagle(Eagle3Options(layer_ids=[2, 4, 6]), session.target, None)
    return {"eagle3": eagle, "medusa": build_medusa(MedusaOptions(num_heads=3), session.target, None)}


@pytest.fixture
def bush(workplace: Path) -> str:
    (workplace / "bush.json").write_text("[[0], [1], [0, 0]]")
    return str(workplace / "bush.json")


def recipe_with(workplace: Path, *words: str) -> Recipe:
    return parse_recipe([*options(workplace, workplace / "run"), *words])


def select(
    session: Session, recipe: Recipe, heads: dict[str, DraftHead], longest: int = 100, warn: Any = None
) -> list[SystemUnderTest]:
    """The drafters of another recipe for the session's target, which is loaded once."""
    return select_drafters(recipe, heads, session.target, longest, session.tokenizer, warn or [].append)


def selected(
    session: Session, workplace: Path, heads: dict[str, DraftHead], drafts: str, baselines: str = ""
) -> list[Any]:
    words = ["--evaluate.drafts", f"[{drafts}]", "--evaluate.baselines", f"[{baselines}]"]
    return select(session, recipe_with(workplace, *words), heads)


def test_baselines_are_measured_with_the_heads(session: Session, workplace: Path, heads: dict[str, DraftHead]) -> None:
    wanted = f"{{kind: prompt_lookup}}, {{kind: prompt_lookup, max_ngram: 5}}, {{kind: draft_model, path: {workplace / 'padded'}}}"
    found = selected(session, workplace, heads, "{tree: chain}", wanted)
    names = ["eagle3", "medusa", "prompt lookup", "prompt lookup, 5-grams", "draft model padded"]
    assert [c.name for c in found] == names
    lookup, longer, draft = found[2:]
    assert [(c.method, c.lossless, c.fixed_length, c.head) for c in (lookup, draft)] == [
        ("prompt_lookup", True, False, None),
        ("draft_model", True, True, None),
    ]
    assert all(c.simulate is not None for c in found)
    assert [d.max_ngram for d in (lookup.make(2), longer.make(2)) if isinstance(d, PromptLookup)] == [3, 5]
    drafter = draft.make(4)
    assert isinstance(drafter, DraftModel)
    assert (drafter.num_speculative_tokens, drafter.width) == (4, session.target.vocab_size)
    assert draft.info.parameters == sum(p.numel() for p in drafter.model.model.parameters())
    assert draft.fingerprint == drafter.model.fingerprint


def test_results_name_the_engines_that_do_not_compute_the_runs_own_head(
    session: Session, workplace: Path, heads: dict[str, DraftHead]
) -> None:
    """Of another head they say nothing: a plan starts engines with the run's own."""
    options = Eagle3Options(layer_ids=[2, 4, 6], sliding_window=16)
    ours = {"eagle3": build_eagle(options, session.target, None), "medusa": heads["medusa"], "other": heads["eagle3"]}
    recipe = recipe_with(workplace, "--evaluate.drafts", "[{tree: chain}]")
    found = with_records(recipe, workplace, {"eagle3": ours["eagle3"]}, session.target, select(session, recipe, ours))
    assert {"eagle3/sglang", "eagle3/tensorrt_llm"} <= set(found[0].info.engines_without)
    assert "eagle3/vllm" not in found[0].info.engines_without
    assert [c.info.engines_without for c in found[1:]] == [(), ()]


def test_windows_are_measured_beside_the_whole_text_with_heads_that_take_one(
    session: Session, workplace: Path, heads: dict[str, DraftHead]
) -> None:
    found = selected(session, workplace, heads, "{tree: chain}, {tree: chain, window: 16}, {tree: chain, window: 2}")
    assert [c.name for c in found] == ["eagle3", "eagle3, window 16", "eagle3, window 2", "medusa"]
    assert [c.make(2).head.window for c in found[:3]] == [None, 16, 2]
    assert [c.max_k for c in found[:3]] == [found[0].max_k, found[0].max_k, 2]
    assert [c.name for c in at_temperature(found, Sampling())] == [c.name for c in found]
    assert heads["eagle3"].window is None
    medusa = {"medusa": heads["medusa"]}
    with pytest.raises(UserError, match=r"window 16, but none of the heads \(medusa\) has attention that takes one"):
        selected(session, workplace, medusa, "{tree: chain}, {tree: chain, window: 16}")
    with pytest.raises(UserError, match="have no attention that takes one: leave it out"):
        with_window(heads["medusa"], 16)


def test_suffix_and_lookahead_decoding_are_measured_as_named(
    session: Session, workplace: Path, heads: dict[str, DraftHead]
) -> None:
    row = {"id": "a", "slice": "s", "prompt_ids": [4, 5], "output_ids": [6, 7]}
    lines = [json.dumps(row | {"output_ids": [6 + n, 7]}) for n in range(3)]
    (workplace / "earlier.jsonl").write_text("".join(f"{line}\n" for line in lines))
    outputs = f"outputs: {workplace / 'earlier.jsonl'}"
    wanted = (
        "{kind: suffix}, {kind: suffix, tree: true, alpha: 2}, {kind: suffix, OUTPUTS, max_cached_requests: 2}, "
        "{kind: lookahead}, {kind: lookahead, W: 4, N: 3}"
    ).replace("OUTPUTS", outputs)
    plain, tree, after, ahead, small = selected(session, workplace, heads, "{tree: chain}", wanted)[2:]
    assert [c.name for c in (plain, tree, after, ahead, small)] == [
        "suffix decoding",
        "suffix decoding, tree, alpha 2.0",
        "suffix decoding, max_cached_requests 2, after earlier.jsonl",
        "lookahead",
        "lookahead, W 4, N 3, G 15",
    ]
    assert [(c.info.tree, c.nodes(3)) for c in (plain, tree)] == [(None, 4), ("suffix tree", 4)]
    assert tree.make(2).rules == SuffixRules(alpha=2, tree=True)
    assert after.make(2).outputs.text_T.tolist() == [7, 7, -1, 8, 7, -1]
    assert (plain.fingerprint, len(after.fingerprint)) == (None, 16)
    assert [c.simulate is not None for c in (plain, tree, after, ahead, small)] == [True, True, True, False, False]
    assert not any(c.fixed_length for c in (plain, tree, after, ahead, small))
    drafter = small.make(small.num_speculative_tokens)
    assert isinstance(drafter, Lookahead)
    assert (drafter.W, drafter.N, drafter.G) == (4, 3, 15)
    assert (small.lengths, small.nodes(2), small.info.nodes) == ((2,), drafter.max_nodes, 37)


@pytest.mark.parametrize(
    ("baseline", "longest", "said"),
    [
        ("{kind: lookahead}", 240, "target beside lookahead reads at most 256 tokens, but .* has 257"),
        ("{kind: suffix, outputs: chat.jsonl}", 100, r"chat.jsonl, line 1 is not an answer"),
    ],
)
def test_baselines_that_cannot_draft_are_refused(
    session: Session, workplace: Path, heads: dict[str, DraftHead], baseline: str, longest: int, said: str
) -> None:
    baseline = baseline.replace("chat.jsonl", str(workplace / "chat.jsonl"))
    fake = recipe_with(workplace, "--evaluate.baselines", f"[{baseline}]")
    with pytest.raises(UserError, match=said):
        select(session, fake, {"medusa": heads["medusa"]}, longest)


def test_outputs_that_are_not_there_are_refused_before_any_work(workplace: Path) -> None:
    words = ["--evaluate.baselines", "[{kind: suffix, outputs: nowhere.jsonl}]"]
    with pytest.raises(UserError, match=r"names the outputs nowhere.jsonl, but there is no such file"):
        check_named_drafters(parse_recipe([*options(workplace, workplace / "run"), *words]))


def test_every_way_to_draft_is_named_and_only_certain_ones_are_simulated(
    session: Session, workplace: Path, heads: dict[str, DraftHead], bush: str
) -> None:
    drafts = f"{{tree: chain}}, {{tree: {bush}}}, {{tree: {bush}, children: drawn}}, {{tree: dynamic, depth: 3, total_tokens: 20}}"
    drafts += ", {tree: best_first, depth: 2, total_tokens: 5}"
    found = selected(session, workplace, heads, f"{drafts}, {{tree: {bush}, acceptance: typical}}")
    simulated = {c.name: c.simulate is not None for c in found}
    assert simulated == {
        "eagle3": True,
        "eagle3 bush": True,
        "eagle3 bush, drawn": False,
        "eagle3 dynamic 3x8, 20 tokens": False,
        "eagle3 bush, typical (lossy)": False,
        "medusa": True,
        "medusa bush": True,
        "medusa bush, drawn": False,
        "medusa best_first 2x8, 5 tokens": True,
        "medusa bush, typical (lossy)": False,
    }
    dynamic = found[3]
    assert (dynamic.info.tree, dynamic.info.nodes, dynamic.info.num_speculative_tokens) == (
        "dynamic 3x8, 20 tokens",
        19,
        3,
    )
    assert [dynamic.nodes(k) for k in (1, 2, 3)] == [9, 20, 20]
    assert dynamic.make(1).max_nodes == 9
    drawn = found[2]
    assert (drawn.info.tree, drawn.nodes(2), drawn.make(2).drawn) == ("bush, drawn", 4, True)
    # At temperature 0 drawn children are the likely ones, and the lossy rule is the exact one.
    greedy = [c.name for c in at_temperature(found, Sampling())]
    growing = ["eagle3 dynamic 3x8, 20 tokens", "medusa best_first 2x8, 5 tokens"]
    assert greedy == ["eagle3", "eagle3 bush", growing[0], "medusa", "medusa bush", growing[1]]
    assert [c.name for c in at_temperature(found[::-1], Sampling())] == greedy[::-1], "whatever comes first"
    assert at_temperature(found, Sampling(1.0)) == found
    alone = [c for c in found if c.name == "medusa bush, drawn"]
    assert at_temperature(alone, Sampling()) == alone, "what repeats nothing stays"


@pytest.mark.parametrize(
    ("drafts", "said"),
    [
        (
            "{tree: dynamic}, {tree: chain}",
            "dynamic 6x8, 60 tokens, but none of the heads .medusa. drafts dynamic trees",
        ),
        ("{tree: dynamic}", "names only trees that medusa heads do not draft: add {tree: chain}"),
        ("{tree: BUSH}, {tree: OTHER/bush.json}", "two drafters of the name 'medusa bush'"),
    ],
)
def test_drafts_that_do_not_fit_the_heads_are_refused(
    session: Session, workplace: Path, heads: dict[str, DraftHead], bush: str, drafts: str, said: str
) -> None:
    (workplace / "elsewhere").mkdir(exist_ok=True)
    (workplace / "elsewhere" / "bush.json").write_text("[[0], [1]]")
    drafts = drafts.replace("BUSH", bush).replace("OTHER", str(workplace / "elsewhere"))
    with pytest.raises(UserError, match=said):
        selected(session, workplace, {"medusa": heads["medusa"]}, drafts)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "nowhere, but there is no such folder"),
        ("chat.jsonl", "but there is no such folder"),
        ("empty", "cannot be used: No tokenizer could be loaded from .*empty"),
        ("target", "names the target .* as its own draft model"),
        ("other", r"other has another tokenizer than the target: id \d+ is 'new0' there and no token in the target"),
        ("short", "short reads at most 64 tokens, but the longest text with its draft has 104"),
        ("bare", "names a draft model that cannot be used: .* has no weights"),
        ("drafts", "cannot be used: The target .*drafts is a draft head: give the folder of the model"),
    ],
)
def test_draft_models_that_do_not_fit_the_target_are_refused(
    session: Session, workplace: Path, heads: dict[str, DraftHead], path: str, said: str
) -> None:
    (workplace / "empty").mkdir(exist_ok=True)
    bare = workplace / "bare"
    bare.mkdir(exist_ok=True)
    tiny_tokenizer().save_pretrained(bare)
    (workplace / "drafts").mkdir(exist_ok=True)
    (workplace / "drafts" / "config.json").write_text('{"method": "medusa"}')
    (bare / "config.json").write_bytes((workplace / "small" / "config.json").read_bytes())
    with pytest.raises(UserError, match=said) as caught:
        selected(session, workplace, heads, "{tree: chain}", f"{{kind: draft_model, path: {workplace / path}}}")
    assert "\n" not in str(caught.value)


def test_a_head_that_reads_less_than_the_longest_text_is_refused(
    session: Session, workplace: Path, heads: dict[str, DraftHead]
) -> None:
    small = load_head(workplace / "short", session.target)
    assert (small.reads.context_length, heads["medusa"].reads.context_length) == (64, None)
    asked = recipe_with(workplace, "--evaluate.drafts", "[{tree: chain}]", "--evaluate.max_k", "4")
    both = heads | {"draft_model": small}
    assert [c.name for c in select(session, asked, both, 60)] == ["eagle3", "medusa", "draft_model"]
    with pytest.raises(UserError, match=r"The head draft_model reads at most 64 tokens, but .* its draft has 65"):
        select(session, asked, both, 61)


def test_a_head_by_the_name_of_the_run_s_own_is_refused(session: Session, workplace: Path) -> None:
    asked = recipe_with(workplace, "--evaluate.beside.medusa", str(workplace / "small"))
    with pytest.raises(UserError, match="names a head 'medusa', the name of the run's own"):
        load_compared(asked, session.target, "medusa", [].append)


def test_two_draft_models_of_one_name_are_refused(
    session: Session, workplace: Path, heads: dict[str, DraftHead]
) -> None:
    (workplace / "again").mkdir(exist_ok=True)
    link = workplace / "again" / "small"
    if not link.exists():
        link.symlink_to(workplace / "small")
    both = ", ".join(f"{{kind: draft_model, path: {path}}}" for path in (workplace / "small", link))
    with pytest.raises(UserError, match="two drafters of the name 'draft model small'"):
        selected(session, workplace, heads, "{tree: chain}", both)


def test_a_head_that_reaches_less_far_drafts_as_far_as_it_can(
    session: Session, workplace: Path, heads: dict[str, DraftHead]
) -> None:
    words = ["--evaluate.num_speculative_tokens", "4", "--evaluate.max_k", "6"]
    asked = recipe_with(workplace, *words)
    warnings = list[str]()
    found = select(session, asked, heads, warn=warnings.append)
    assert warnings == [
        "evaluate.num_speculative_tokens is 4, but medusa drafts 3 tokens at most: its chains are measured with 3."
    ]
    assert [(c.num_speculative_tokens, c.lengths) for c in found] == [(4, (1, 2, 3, 4, 5, 6)), (3, (1, 2, 3))]
    assert replace(found[0], simulate=None).lengths == (4,)


def test_a_way_to_draft_can_be_kept_to_some_heads(
    session: Session, workplace: Path, heads: dict[str, DraftHead], bush: str
) -> None:
    found = selected(session, workplace, heads, f"{{tree: chain}}, {{tree: {bush}, heads: [medusa]}}")
    assert [c.name for c in found] == ["eagle3", "medusa", "medusa bush"]
    with pytest.raises(UserError, match=r"heads names 'hydra', but the heads measured are eagle3, medusa"):
        selected(session, workplace, heads, f"{{tree: chain}}, {{tree: {bush}, heads: [hydra]}}")


def test_a_head_is_told_by_its_configuration_too_and_as_earlier_versions_named_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_workplace(tmp_path)
    head = save_untrained(folder)
    words = [
        "evaluate",
        "--no-decode",
        *options(folder, tmp_path / "run"),
        "--head",
        str(head),
        "--evaluate.temperatures",
        "[0.0]",
    ]
    assert main(words) == 0
    file = tmp_path / "run" / "run.json"
    records = json.loads(file.read_text())
    inputs = records["simulate"]["inputs"]
    assert inputs["head"] == head_digest(head)
    inputs["head"] = sha256_file(head / "model.safetensors")[:16]
    records["simulate"]["fingerprint"] = fingerprint(inputs)
    earlier = json.dumps(records)
    file.write_text(earlier)
    capsys.readouterr()
    assert main(words) == 0
    assert "simulate: reusing" in capsys.readouterr().err
    config = json.loads((head / "config.json").read_text())
    assert main([*words, "--redo", "simulate"]) == 0
    config["options"]["norm_before_residual"] = True
    (head / "config.json").write_text(json.dumps(config))
    assert "made with other settings (the head changed)" in fails(words, capsys)
