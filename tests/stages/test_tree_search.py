"""`draftsmith search-tree` on a miniature target: from a trained head to a tree that the evaluation decodes."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from draftsmith.cli.main import main
from draftsmith.data.batch import Tokenized
from draftsmith.decoder.answers import Request, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import StaticTree, load_tree, read_origin
from draftsmith.eval.clocks.costs import measure_costs
from draftsmith.eval.results.result import Costs, read_result
from draftsmith.eval.simulate.texts import head_simulator, to_sample
from draftsmith.eval.tree_search.lengths import Spent
from draftsmith.eval.tree_search.search import TextRanks, TreeCosts, find_trees, measure_tree, read_ranks
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.registry import methods
from draftsmith.stages.tree_search import _by_slice, _of_any_depth, answer_start
from draftsmith.target.target import load_target
from tests.workplace import digests, fails, make_workplace

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Medusa heads, trained, with recipes for them and for EAGLE-3."""
    torch.set_num_threads(1)
    folder = make_workplace(tmp_path_factory.mktemp("trees"))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe |= {"method": "medusa", "head": {"num_heads": 3}, "output_dir": str(folder / "run")}
    recipe["evaluate"] |= {"batch": 2}
    (folder / "medusa.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "--recipe", str(folder / "medusa.yaml")]) == 0
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """How exactly a step is timed says nothing here."""
    monkeypatch.setattr("draftsmith.eval.tree_search.search.measure_costs", partial(measure_costs, repeats=1))
    monkeypatch.setenv("COLUMNS", "100")


def search(workplace: Path, *words: str) -> int:
    return main(["search-tree", "--recipe", str(workplace / "medusa.yaml"), *words])


def test_a_tree_of_a_given_size(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nine.json"
    before = digests(workplace / "run")
    assert search(workplace, "--nodes", "9", "--output", str(file)) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(file)
    assert "saved" in printed.out
    assert "10 answers are few" in printed.err
    assert digests(workplace / "run") == before, "searching changes nothing in the run"
    tree, origin = load_tree(str(file)), read_origin(file)
    assert tree is not None
    assert origin is not None
    assert (tree.name, len(tree.choices)) == ("nine", 9)
    assert tree.depth <= 3
    assert origin["chosen"]["levels"] == list(tree.levels)
    assert [size["nodes"] for size in origin["sizes"]] == list(range(1, 10))
    assert origin["sizes"][-1] == origin["chosen"]
    for size in origin["sizes"]:
        cost = size["verify_ms"] + size["draft_ms"]
        assert size["speedup"] == pytest.approx(
            size["tau_held_back"] * origin["costs"]["verify_ms"]["1"] / cost, rel=1e-3
        )
    assert origin["sampling"]["temperature"] == 1.0
    assert origin["costs"]["batch"] == 2
    assert set(origin["costs"]["verify_ms"]) == {"1", "2", "3", "4", "5", "6", "8", "10"}
    assert origin["calibration"]["answers"] == 10
    assert origin["versions"]["draftsmith"]
    assert len(origin["head"]["digest"]) == 16


def test_the_evaluation_takes_the_saved_tree(workplace: Path, tmp_path: Path) -> None:
    file = tmp_path / "six.json"
    assert search(workplace, "--nodes", "6", "--temperature", "0", "--output", str(file)) == 0
    drafts = json.dumps([{"tree": "chain"}, {"tree": str(file)}])
    run = ["--output_dir", str(workplace / "other"), "--data_dir", str(workplace / "run")]
    run += ["--head", str(workplace / "run")]
    words = ["--no-decode", "--evaluate.drafts", drafts, "--evaluate.temperatures", "[0]", *run]
    assert main(["evaluate", "--recipe", str(workplace / "medusa.yaml"), *words]) == 0
    found = read_result(workplace / "other" / "simulation" / "t0" / "result.json").drafters["medusa six"]
    assert (found.overall.tau_simulated or 0) > 1
    assert found.draft is not None
    assert (found.draft.nodes, found.draft.tree) == (6, "six")


def test_without_a_size_the_fastest_is_saved_in_the_run(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = workplace / "run" / "tree.json"
    assert search(workplace, "--nodes", "2") == 0
    assert search(workplace, "--nodes", "auto") == 0, "its own file is written again"
    assert "saved" in capsys.readouterr().out
    origin = read_origin(file)
    assert origin is not None
    assert origin["chosen"]["speedup"] == max(size["speedup"] for size in origin["sizes"])
    assert origin["sizes"][-1]["nodes"] == 126, "as far as the context of 256 allows"
    assert origin["published"] == {}, "medusa_63 is four deep, and there are three heads"
    file.unlink()


def test_answers_of_another_temperature_are_made_anew(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The miniature repeats itself greedily, which its heads learn: a chain of most likely tokens is then right. Another search finds the
    answers again."""
    taus = {}
    for temperature in ("1.0", "0"):
        file = tmp_path / f"t{temperature}.json"
        assert search(workplace, "--nodes", "3", "--temperature", temperature, "--output", str(file)) == 0
        printed = capsys.readouterr().err
        origin = read_origin(file)
        assert origin is not None
        assert origin["sampling"]["temperature"] == float(temperature)
        assert ("the target answers 10 of its held-out prompts" in printed) == (temperature == "0")
        assert ("new answers" in origin["calibration"]["source"]) == (temperature == "0")
        taus[temperature] = origin["chosen"]["tau"]
    assert taus["0"] > taus["1.0"] + 0.5
    run, other = str(workplace / "run"), tmp_path / "other"
    places = ["--head", run, "--data_dir", run, "--output_dir", str(other), "--output", str(tmp_path / "again.json")]
    assert search(workplace, "--nodes", "3", "--temperature", "0", *places) == 0
    assert not other.exists(), "a run that is not there would be refused as somebody's folder"
    monkeypatch.setattr("draftsmith.eval.simulate.answers.decode", None)
    words = ["--chain", "--evaluate.batch", "1", "--temperature", "0", "--output", str(tmp_path / "chain.json")]
    assert search(workplace, *words) == 0


def test_ranks_give_the_accepted_length_that_the_simulation_gives(workplace: Path) -> None:
    """On new answers of different lengths, for trees of several shapes."""
    target = load_target(str(workplace / "target"))
    head = load_head(workplace / "run" / "train" / "best", target)
    prompts = torch.randint(3, 300, (11, 9), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        Request.seeded(f"talk#{i}" if i < 3 else str(i), "s", prompt[: 4 + i % 5], 5 + i, 0)
        for i, prompt in enumerate(prompts)
    ]
    decoded = decode_batch(target, TargetAlone(), requests, Sampling(0.3))
    samples = [to_sample(g) for g in decoded.generations]
    talk = [replace(one, conversation="talk") if "#" in one.sample_id else one for one in samples]
    texts = read_ranks(target, head, talk, 3, 20)
    assert texts.answers == 11
    assert set(texts.conversations) == {"talk", *map(str, range(3, 11))}
    assert len({*read_ranks(target, head, samples, 3, 20).conversations}) == 11, "an id such as dolly#3 is no turn"
    for choices in ([[0], [1], [0, 0], [1, 0], [0, 0, 0]], [[0], [0, 3], [0, 3, 1]], [[rank] for rank in range(20)]):
        tree = StaticTree.of("some", choices)
        simulation = head_simulator(head, tree=tree)(target, decoded.generations, Sampling(0.3), tree.depth)
        tau = total((tallies[-1] for tallies in simulation.tallies), tree.depth).tau
        assert measure_tree(tree, texts) == pytest.approx(tau, abs=1e-12)


def test_where_chains_should_end_goes_into_the_recipe(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftsmith.stages.tree_search.measure_costs", partial(measure_costs, repeats=1))
    file, one = tmp_path / "chain.json", ["--evaluate.batch", "1"]
    assert search(workplace, "--chain", "--output", str(file), *one) == 0
    printed = capsys.readouterr()
    assert [line.split()[1] for line in printed.out.splitlines() if " tokens" in line] == ["1", "2", "3"]
    found, origin = json.loads(file.read_text()), read_origin(file)
    assert origin is not None
    assert set(origin["ways"]["adaptive"]["speedup"]) == {"overall", "chat", "code"}
    words = ["--evaluate.drafts", printed.err.rpartition("evaluate.drafts: ")[2].strip().replace("chain,", "chain, ")]
    run = [
        "--output_dir",
        str(tmp_path / "run"),
        "--data_dir",
        str(workplace / "run"),
        "--head",
        str(workplace / "run"),
    ]
    assert main(["evaluate", "--recipe", str(workplace / "medusa.yaml"), "--no-decode", *words, *run, *one]) == 0
    result = read_result(tmp_path / "run" / "simulation" / "t0" / "result.json")
    assert set(result.drafters) == {"medusa", "medusa adaptive"}
    assert result.drafters["medusa adaptive"].draft.num_speculative_tokens == len(found["floors"]) == 3
    assert search(workplace, "--chain", "--output", str(file), *one) == 0, "its own file is written again"


def test_where_steps_cost_much_drafts_are_shallow() -> None:
    ranks = np.zeros((12, 3), dtype=np.int16)
    texts = TextRanks.of([ranks] * 8, list("abcdefgh"), 4)
    found = find_trees(texts, [1, 3])
    assert found[1].tree.depth == 3
    verify = {str(n): 10.0 for n in range(1, 5)}
    for step_ms, depth in ((0.1, 3), (50.0, 1)):
        draft_ms = {"head 3 nodes": {str(k): k * step_ms for k in (1, 2, 3)}, "head 1 nodes": {"1": step_ms}}
        costs = TreeCosts(Costs(verify, draft_ms), (found[0].tree, found[1].tree))
        chosen = _of_any_depth(texts, [costs.budget(one) for one in found], costs)
        assert [(budget.nodes, budget.found.tree.depth) for budget in chosen] == [(1, 1), (3, depth)]


def test_the_last_answer_of_a_talk_is_answered_anew() -> None:
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 0]).bool()
    assert answer_start(Tokenized(torch.arange(9), mask, "a", "s")) == 5
    assert answer_start(Tokenized(torch.arange(9), mask & (torch.arange(9) < 4), "a", "s")) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes is '0': give the number of drafted tokens, from 1 to 1023, or auto"),
        (["--nodes", "1024"], "--nodes is '1024'"),
        (["--redo", "train"], "search-tree makes no stage of a recipe: leave --redo out"),
        (["--nodes", "127"], "--nodes is 127: the target's context of 256 has room for 126"),
        (["--temperature", "-1"], "--temperature is '-1'"),
        (["--output", "nowhere/tree.json"], "There is no folder nowhere for --output nowhere/tree.json"),
        (["--output", "{workplace}"], "is no tree that search-tree wrote"),
        (["--output", "{workplace}/medusa.yaml"], "is no tree that search-tree wrote"),
        (["--chain"], "evaluate.batch is 2: a round takes as long as its longest draft there"),
        (["--chain", "--nodes", "3"], "--nodes is the size of a tree: leave it out with --chain"),
        (["--head", "nowhere"], "--head: there is no folder nowhere: check its name; a head on the Hub"),
        (["--output_dir", "{workplace}"], "There is no trained head in"),
        (["--output_dir", "{workplace}", "--head", "{workplace}/run"], "There are no finished answers in"),
        (["--data.heldout", "12"], "the head was trained with 10, so it has seen some of these answers"),
        (["--train.row_tokens", "96"], "The head was trained with other data (train.row_tokens was"),
        (["--data.heldout", "3"], "There are only 3 conversations with answers to draft for"),
        (["--output_typo", "x"], "there is no key output_typo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_sentence_and_change_nothing(
    workplace: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(workplace)
    given = [word.format(workplace=workplace) for word in words]
    assert message in fails(["search-tree", "--recipe", str(workplace / "medusa.yaml"), *given], capsys)
    assert digests(workplace) == before


def test_unfinished_answers_are_not_made_here(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = json.loads((workplace / "run" / "run.json").read_text())
    known["answers"]["state"] = "running"
    (tmp_path / "run.json").write_text(json.dumps(known))
    assert search(workplace, "--data_dir", str(tmp_path)) == 2
    assert f"There are no finished answers in {tmp_path}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_method_without_static_trees_is_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(methods(), "medusa", replace(methods()["medusa"], trees=frozenset({"drawn"})))
    assert search(workplace, "--nodes", "3") == 2
    assert "of medusa, which drafts no static trees" in capsys.readouterr().err


def test_a_slice_without_a_drafted_token_has_no_speedup() -> None:
    """Such as one whose answers are all one word."""
    two = np.array([4.0, 0.0])
    spent = {"1 tokens": Spent(two, two / 2, two, 3 * two), "adaptive": Spent(two, two / 2, two, 2 * two)}
    found = _by_slice(spent, ["chat", "yes/no"], 6.0)
    assert found["adaptive"]["speedup"] == {"overall": 3.0, "chat": 3.0}
    assert found["1 tokens"]["speedup"] == {"overall": 2.0, "chat": 2.0}
