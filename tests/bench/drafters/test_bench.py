"""The comparison of drafters: a miniature from training to page, the page by itself, and the rival's reader of the store."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.data.features.store import FeatureStore
from draftsmith.errors import UserError
from draftsmith.stages.session import Session
from scripts.bench.drafters import bench as drafters_bench
from scripts.bench.drafters.bench import OUTPUT, main, parse
from scripts.bench.drafters.measure import Measure
from scripts.bench.drafters.page import best_run, read_entries, render
from scripts.bench.drafters.table import DRAFTERS, ROOT, ComparedDrafter
from scripts.bench.drafters.training import Bench, epochs_for, rival_jobs, whole_seconds
from scripts.bench.rivals.cpu_parts import Supervision, blocks, document_attention, orthogonalise
from scripts.bench.rivals.speculators_eagle3 import Store, final_norm, identify_job, refuse_other_job, vocab_maps
from scripts.bench.rivals.speculators_eagle3 import train as train_rival
from tests.workplace import make_workplace

pytestmark = pytest.mark.slow

RIVAL = ComparedDrafter("rival", rates=(0.1, 0.2))
TINY = (
    ComparedDrafter("eagle3", "recipe.yaml", factors=(1.0, 2.0)),
    RIVAL,
    ComparedDrafter("other-layers", "recipe.yaml", overrides=("--head.layer_ids=[1, 3]",)),
    ComparedDrafter("medusa", "medusa.yaml"),
    ComparedDrafter("medusa2", "medusa2.yaml", first="medusa.yaml"),
)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, data, and recipes for an EAGLE-3, for Medusa, and for a method that is not there."""
    folder = make_workplace(tmp_path_factory.mktemp("drafters"))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["train"] |= {"checkpoint_minutes": 5.0, "evaluations": 1}
    recipe["evaluate"] |= {"num_speculative_tokens": 3, "max_k": 4, "repeats": 1, "dtype": "float32"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"method": "eagle3"}))
    (folder / "medusa.yaml").write_text(yaml.safe_dump(recipe | {"method": "medusa", "head": {"num_heads": 2}}))
    second = {"head": {"num_heads": 2, "lora_r": 2}, "train": recipe["train"] | {"warm_start": "nowhere"}}
    (folder / "medusa2.yaml").write_text(yaml.safe_dump(recipe | {"method": "medusa2"} | second))
    return folder


def words(folder: Path, *further: str) -> list[str]:
    places = {"store": folder / "store", "runs": folder / "runs", "output": folder / "out"}
    return [word for key, path in places.items() for word in (f"--{key}", str(path))] + ["--budget", "1700", *further]


@pytest.fixture(scope="module")
def results(workplace: Path) -> dict[str, dict]:
    """The result files of a first run with one drafter, then of a second with all."""
    assert main(words(workplace, "--only", "eagle3"), TINY, workplace) == 0
    other = workplace / "runs" / "rival-0.2"
    shutil.copytree(workplace / "runs" / "eagle3-lr2" / "train" / "best", other / "head")
    settings = {"lr": 0.2, "muon_lr": 0.3, "optimizer": "muon"}
    record = {"trainer": "other 1.0", "seconds": 65.0, "tokens": 10, "supervised_tokens": 5, "steps": 2}
    (other / "training.json").write_text(json.dumps(record | {"parameters": 7, "settings": settings}))
    assert main(words(workplace, "--no-decode"), TINY, workplace) == 0
    return {path.stem: json.loads(path.read_text()) for path in (workplace / "out").glob("*.json")}


def test_every_drafter_is_measured_on_the_same_answers(workplace: Path, results: dict[str, dict]) -> None:
    assert sorted(results) == ["eagle3", "medusa", "medusa2", "other-layers", "rival"]
    assert set(results["eagle3"]["runs"][0]["simulated"]["1"]["tau"]) == {"3", "5", "7"}
    assert set(results["medusa"]["runs"][0]["simulated"]["1"]["tau"]) == {"2"}, "as far as its heads reach"
    assert len(list((workplace / "runs" / "answers").glob("*.json"))) == 4, (
        "one file per temperature for all, and one for the tuned target's own"
    )
    assert [entry["decoded"] is None for entry in results.values()].count(False) == 1
    timed = results["eagle3"]["decoded"]["at"]["1"]
    assert timed["repeats"] == 3, "honest timing tells a spread"
    assert timed["speedup_spread"][0] <= timed["speedup"] <= timed["speedup_spread"][1]


def test_the_best_run_is_decoded_too(results: dict[str, dict]) -> None:
    entry = results["eagle3"]
    best, at = best_run(entry["runs"]), entry["decoded"]["at"]["0"]
    assert entry["decoded"]["head"] == best["head"]
    assert best["heldout_tau"] == max(run["heldout_tau"] for run in entry["runs"]) > 1.0
    assert "heldout_tau" not in results["medusa"]["runs"][0], "there is nothing to choose"
    assert all(0 < run["training"]["head_step"] <= run["training"]["steps"] for run in entry["runs"])
    assert at["equal"] == at["checked"] == 4
    assert min(at["draft_ms"], at["target_ms"], at["speedup"]) > 0
    found = best["simulated"]["0"]["tau"]["3"]
    assert set(found) == {"overall", "chat", "code"}
    assert at["tau"] == pytest.approx(at["tau_simulated"])
    assert at["tau"] == pytest.approx(found["overall"]["value"]), "decoding finds what was simulated"


@pytest.mark.parametrize("word", ["--evaluate.top_p=0.9", "--evaluate.repetition_penalty=2.0", "--evaluate.batch=8"])
def test_what_was_measured_otherwise_is_measured_again(word: str, workplace: Path, results: dict[str, dict]) -> None:
    def inputs(*further: str) -> str:
        bench = Bench(workplace / "store", workplace / "runs", further, root=workplace)
        recipe = bench.recipe(TINY[0], f"--output_dir={workplace / 'runs' / 'evaluation'}")
        return Measure(Session(recipe), workplace / "runs" / "answers").inputs

    assert inputs() == results["eagle3"]["runs"][0]["inputs"] != inputs(word)


def test_runs_learn_as_much_as_the_budget_says(workplace: Path, results: dict[str, dict]) -> None:
    first, second = (run["training"] for run in results["eagle3"]["runs"])
    assert second["lr"] == pytest.approx(2 * first["lr"])
    assert second["muon_lr"] == pytest.approx(2 * first["muon_lr"])
    for entry in results.values():
        for run in entry["runs"]:
            if entry["name"] not in ("rival", "medusa2"):
                assert run["training"]["supervised_tokens"] == first["supervised_tokens"]
    # Two stages share what others have in one.
    both = results["medusa2"]["runs"][0]["training"]
    assert both["supervised_tokens"] == first["supervised_tokens"]
    assert "--train.warm_start=RUNS/medusa2-first" in both["overrides"]
    for entry in results.values():
        assert str(workplace) not in json.dumps(entry), "no folder of this machine in a file that is committed"
    stages = [
        json.loads((workplace / "runs" / n / "train" / "summary.json").read_text())
        for n in ("medusa2-first", "medusa2-lr1")
    ]
    assert both["steps"] == sum(stage["step"] for stage in stages)
    assert both["tokens"] == sum(stage["tokens"] for stage in stages)
    assert both["seconds"] == pytest.approx(sum(stage["train_seconds"] for stage in stages))
    store = json.loads((workplace / "store" / "run.json").read_text())
    assert store["features"]["inputs"]["layer_ids"] == [2, 4, 6], "the store is that of the first drafter"
    assert "--features.source=online" in results["other-layers"]["runs"][0]["training"]["overrides"]
    assert results["rival"]["runs"][0]["training"]["settings"]["trainer"] == "other 1.0"
    assert results["rival"]["runs"][0]["parameters"] == 7
    # The rival's head is a copy of the second run's.
    assert results["rival"]["runs"][0]["simulated"] == results["eagle3"]["runs"][1]["simulated"]


def test_what_is_there_is_neither_trained_nor_measured_again(workplace: Path, results: dict[str, dict]) -> None:
    files = [p for p in workplace.rglob("*") if p.is_file() and p.suffix in (".json", ".jsonl", ".md", ".safetensors")]
    before = {path: path.read_bytes() for path in files}
    assert main(words(workplace, "--only", "eagle3"), TINY, workplace) == 0
    assert main(words(workplace, "--no-decode"), TINY, workplace) == 0
    assert {path: path.read_bytes() for path in files} == before
    shutil.copytree(workplace / "out", workplace / "copy")
    (workplace / "copy" / "README.md").unlink()
    assert main([*words(workplace), "--page", "--output", str(workplace / "copy")], TINY, workplace) == 0
    assert (workplace / "copy" / "README.md").read_bytes() == before[workplace / "out" / "README.md"]


def test_a_run_that_is_not_at_hand_keeps_its_figures(
    workplace: Path, results: dict[str, dict], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the second run is asked for; the first, better by its record, stays and is what decoding would need."""
    output = workplace / "narrowed"
    shutil.copytree(workplace / "out", output)
    entry = json.loads((output / "eagle3.json").read_text())
    first, second = entry["runs"]
    first |= {"head": "gone", "heldout_tau": 9.0}
    del second["simulated"]
    second["head"] = "before it was trained again"
    (output / "eagle3.json").write_text(json.dumps(entry))
    assert main(words(workplace, "--only", "eagle3-lr2", "--output", str(output)), TINY, workplace) == 0
    after = json.loads((output / "eagle3.json").read_text())
    assert after["runs"][0] == first
    # Who measured, and when, is new.
    for key in ("head", "simulated", "heldout_tau", "training"):
        assert after["runs"][1][key] == results["eagle3"]["runs"][1][key]
    assert after["decoded"] == results["eagle3"]["decoded"], "it is of the second run, and the tables leave it out"
    assert "eagle3-lr1 is the best run of eagle3 on the answers" in capsys.readouterr().err
    again = words(workplace, "--only", "eagle3-lr2", "--output", str(output), "--no-train", "--budget", "99999")
    assert main(again, TINY, workplace) == 0
    assert json.loads((output / "eagle3.json").read_text()) == after, "there is none of another budget"


def test_a_run_on_other_answers_is_kept_beside_one_of_its_name(workplace: Path, results: dict[str, dict]) -> None:
    """A new machine samples other answers: what was measured on the old ones stays, with what was decoded of it."""
    output = workplace / "anew"
    shutil.copytree(workplace / "out", output)
    entry = json.loads((output / "eagle3.json").read_text())
    for run in entry["runs"]:
        run["training"]["answers"] = "of another machine"
        run |= {"head": f"its {run['training']['name']}", "date": "2000-01-01"}
    entry["decoded"]["head"] = entry["runs"][0]["head"]
    (output / "eagle3.json").write_text(json.dumps(entry))
    assert main(words(workplace, "--only", "eagle3-lr2", "--output", str(output), "--no-decode"), TINY, workplace) == 0
    after = json.loads((output / "eagle3.json").read_text())
    assert [run["head"] for run in after["runs"]] == [
        "its eagle3-lr1",
        "its eagle3-lr2",
        results["eagle3"]["runs"][1]["head"],
    ]
    assert after["runs"][:2] == entry["runs"]
    assert after["decoded"] == entry["decoded"]


def test_another_budget_is_refused_and_without_training_left_out(workplace: Path, results: dict[str, dict]) -> None:
    again = [*words(workplace, "--only", "medusa"), "--budget", "99999"]
    assert main(again, TINY, workplace) == 2
    assert main([*again, "--no-train"], TINY, workplace) == 0
    assert json.loads((workplace / "out" / "medusa.json").read_text()) == results["medusa"]


def test_the_rival_reads_the_store_as_we_do(workplace: Path, results: dict[str, dict]) -> None:
    target, path = workplace / "target", workplace / "store" / "features"
    ours, norm = FeatureStore(path), final_norm(str(target))
    # A new model's norm has weights of one, which would hide which way they are applied.
    norm = torch.linspace(0.5, 2.0, len(norm))
    theirs = Store(str(path), [4, 2], norm)
    assert sorted(theirs.length) == sorted(ours.ids)
    for place in (0, len(ours) // 2, len(ours) - 1):
        wanted, found = ours.get(place, (4, 2)), theirs.get(ours.ids[place])
        assert torch.equal(found["input_ids"], wanted.ids)
        assert torch.equal(found["loss_mask"], wanted.mask.bool())
        assert torch.equal(found["hidden_states"], wanted.aux)
        assert torch.allclose(found["verifier_last_hidden_states"] * norm, wanted.last.float(), rtol=1e-5)
        assert found["lengths"].tolist() == [len(wanted.ids)] == [theirs.length[ours.ids[place]]]
        assert found["position_ids"].tolist() == list(range(len(wanted.ids)))
    with pytest.raises(SystemExit, match="weight of zero"):
        Store(str(path), [4], torch.zeros(3))
    with pytest.raises(SystemExit, match="lacks one of the layers"):
        Store(str(path), [5], norm)


def test_a_training_of_another_job_is_not_taken_for_this_one(tmp_path: Path) -> None:
    job = {"store": "/a", "output": "/b", "lr": 0.01, "row_tokens": 512, "train": ["x"], "checkpoint_minutes": 5.0}
    begun = identify_job(job)
    refuse_other_job(begun, job | {"store": "/elsewhere", "checkpoint_minutes": 1.0}, tmp_path)
    for key, value in (("row_tokens", 1024), ("lr", 0.02), ("train", ["y"])):
        with pytest.raises(SystemExit, match="holds a training of another job"):
            refuse_other_job(begun, job | {key: value}, tmp_path)
    record = {"steps": 7, "job": begun}
    (tmp_path / "training.json").write_text(json.dumps(record))
    assert train_rival(job | {"output": str(tmp_path)}) == record
    with pytest.raises(SystemExit, match="holds a training of another job"):
        train_rival(job | {"output": str(tmp_path), "lr": 0.02})


def test_the_rivals_job_has_our_split_and_vocabulary(workplace: Path, results: dict[str, dict]) -> None:
    bench = Bench(workplace / "store", workplace / "runs", budget=1700, root=workplace)
    jobs = rival_jobs(bench, RIVAL, TINY[0])
    assert [job["lr"] for job in jobs.values()] == [0.1, 0.2]
    job = jobs["rival-0.2"]
    head = workplace / "runs" / "eagle3-lr1" / "train" / "best"
    from safetensors.torch import load_file

    vocab = load_file(next(head.glob("*.safetensors")))["draft_vocab"]
    assert job["vocab"] == vocab.tolist()
    t2d, d2t = vocab_maps(job["vocab"], 400)
    assert t2d is not None
    assert d2t is not None
    assert torch.equal(torch.arange(len(vocab)) + d2t, vocab)
    assert torch.equal(t2d.nonzero().flatten(), vocab)
    assert len(job["train"]) == len(set(job["train"])) == 70
    assert (job["ttt_steps"], job["step_tokens"]) == (3, 256)
    epoch = results["eagle3"]["runs"][0]["training"]["supervised_tokens"] / job["epochs"]
    masks = {sample: mask.sum() for sample, mask in _masks(workplace).items()}
    assert sum(masks[name] for name in job["train"]) == epoch


@pytest.mark.parametrize("shape", [(48, 32), (16, 64)])
def test_the_rivals_optimizer_steps_as_torchs(shape: tuple[int, int]) -> None:
    """Up to the roundings of bf16, 2**-8, that five iterations pass on."""
    weights = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    real = torch.optim._muon._zeropower_via_newtonschulz
    for weight, iteration in zip(weights, (real, orthogonalise), strict=True):
        weight.grad = matrix.clone()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", iteration)
            torch.optim.Muon([weight], lr=1.0).step()
    theirs, ours = (weight.detach() for weight in weights)
    assert float(theirs.norm()) > 0
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_the_rivals_attention_by_documents_is_that_of_its_dense_mask() -> None:
    """Documents of 3, 1 and 5 tokens and 2 of padding, over three steps: outputs and gradients of torch's own attention."""
    documents = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1])
    rows = len(documents)
    eye = torch.eye(rows, dtype=torch.bool)
    first = (documents[:, None] == documents) & (documents[:, None] >= 0) & torch.ones(rows, rows).tril().bool() | eye
    mask = torch.cat([first, eye, eye], 1)[None, None]
    assert list(blocks(first)) == [(0, 3), (3, 4), (4, 9), (9, 11)]
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, rows, 8, generator=draw, requires_grad=True)
    key, value = (torch.randn(1, 2, 3 * rows, 8, generator=draw, requires_grad=True) for _ in range(2))
    found, _ = document_attention(None, query, key, value, mask, 0.3)
    dense = torch.nn.functional.scaled_dot_product_attention
    expected = dense(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(found.shape, generator=draw)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), (query, key, value)),
        torch.autograd.grad((expected * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_rival_leaves_out_what_is_not_supervised() -> None:
    """Losses over two steps and their gradients are those of projecting and comparing everything."""

    def squares(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((logits - targets) ** 2).sum(-1)

    draw = torch.Generator().manual_seed(0)
    linear, supervision = torch.nn.Linear(4, 7, bias=False), Supervision()
    project, loss = supervision.project(linear), supervision.loss(squares)
    mask = torch.tensor([[True, False, True, True, False, True]])
    for _ in range(2):  # rows one after the other
        supervision.begin(mask)
        for step in range(3):
            states = torch.randn(1, 6, 4, generator=draw, requires_grad=True)
            targets = torch.randn(1, 6 - step, 7, generator=draw)
            found = loss(project(states)[:, : 6 - step], targets)
            expected = squares(linear(states)[:, : 6 - step], targets) * mask[:, step:]
            torch.testing.assert_close(found, expected)
            ours, theirs = (torch.autograd.grad(one.sum(), states)[0] for one in (found, expected))
            torch.testing.assert_close(ours, theirs)


def _masks(workplace: Path) -> dict[str, torch.Tensor]:
    store = FeatureStore(workplace / "store" / "features")
    return {name: store.get(place).mask for place, name in enumerate(store.ids)}


@pytest.mark.parametrize(
    ("budget", "tokens", "epochs"), [(3_000_000, 601_885, 5), (10, 100, 1), (140, 100, 1), (160, 100, 2)]
)
def test_epochs_come_nearest_to_the_budget(budget: int, tokens: int, epochs: int) -> None:
    assert epochs_for(budget, tokens) == epochs


def test_a_training_that_was_resumed_counts_whole() -> None:
    """The last process had three quarters of the tokens."""
    whole = {"tokens": 4000, "train_seconds": 20.0, "tokens_per_second": 200.0}
    assert whole_seconds(whole) == 20
    assert whole_seconds({**whole, "train_seconds": 15.0}) == 20
    assert whole_seconds({**whole, "train_seconds": 1.0, "tokens_per_second": 0.0}) == 1, "nothing was left to do"


def test_no_supervised_token_is_one_sentence() -> None:
    with pytest.raises(UserError, match="no supervised token"):
        epochs_for(10, 0)


def make_run(name: str, tau: float, rounds: list[float], **changed) -> dict:
    """A run whose tau is the same everywhere."""
    scopes = {scope: {"value": tau, "interval": [tau - 0.1, tau + 0.2]} for scope in ("overall", "math")}
    at = {"tau": {"3": scopes, "5": scopes}, "prompts": {"tokens": [10.0, 30.0], "rounds": rounds}}
    training = {"name": name, "lr": 0.001, "muon_lr": None, "seconds": 90.0, "tokens": 5_000_000}
    training |= {"supervised_tokens": 3_000_000, "steps": 1500, "head_step": 1375, "settings": {"trainer": "other 1.0"}}
    facts = {"command": "python x", "commit": "abcdef0123456", "date": "2026-01-01", "inputs": "same"}
    facts |= {"hardware": {"gpu": None, "cpu": "a CPU", "threads": 1}}
    run = {"head": name, "parameters": 2_500_000, "K": 5, "tuned": False, "simulated": {"0": at, "1": at}}
    return run | {"training": training} | facts | changed


def test_the_run_in_the_tables_is_on_the_answers_of_most(tmp_path: Path) -> None:
    def run(name: str, answers: str, date: str, held: float) -> dict:
        made = make_run(name, 2.0, [5.0, 15.0], date=date, heldout_tau=held)
        return made | {"training": made["training"] | {"answers": answers}}

    several = [run("a-1", "old", "1", 3.0), run("a-1", "most", "2", 1.5), run("a-2", "most", "2", 1.6)]
    alone = [run("c-1", "old", "1", 3.0), run("c-1", "new", "3", 1.0)]
    runs = {"a": [*several, run("a-1", "new", "3", 2.0)], "b": [run("b-1", "most", "2", 1.0)], "c": alone}
    runs["d"] = [run("d-1", "most", "2", 1.0)]
    for name, some in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "runs": some}))
    rows = {entry["name"]: entry["row"] for entry in read_entries(tmp_path, [])}
    chosen = {name: (row["training"]["name"], row["training"]["answers"]) for name, row in rows.items()}
    assert chosen == {"a": ("a-2", "most"), "b": ("b-1", "most"), "c": ("c-1", "new"), "d": ("d-1", "most")}


def write_entries(folder: Path) -> None:
    # What is longest on the prompts was not chosen.
    taus = {"a-lr1": (2.0, 1.9), "a-lr2": (2.5, 2.2), "a-lr3": (2.7, 2.1)}
    runs = [make_run(name, tau, [5.0, 15.0]) | {"heldout_tau": held} for name, (tau, held) in taus.items()]
    older = make_run("a-old", 2.9, [4.0, 12.0], date="2025-12-31") | {"heldout_tau": 2.6}  # of other held-out texts
    older["training"] |= {"answers": "older"}
    runs.insert(0, older)
    at = {"draft_ms": 1.5, "target_ms": 4.0, "tau": 2.51, "speedup": 1.25, "equal": 3, "checked": 4}
    once = {**at, "equal": None, "checked": None, "speedup": 1.5, "speedup_spread": [1.5, 1.5], "repeats": 1}
    decoded = {
        "at": {"0": at | {"speedup_spread": [1.2, 1.31], "repeats": 3}, "1": once},
        **make_run("a-lr2", 1, [1, 1]),
    }
    short = make_run("b-1", 1.5, [10.0, 30.0], tuned=True, K=4)
    reached = short["simulated"]["0"]
    short["simulated"] = dict.fromkeys("01", reached | {"tau": {"3": reached["tau"]["3"], "4": reached["tau"]["5"]}})
    entries = [
        {"name": "a", "recipe": "recipes/a.yaml", "runs": runs, "decoded": decoded},
        {"name": "b", "recipe": None, "runs": [short], "decoded": None},
        {"name": "c", "recipe": None, "runs": [make_run("c-1", 1.5, [1.0, 1.0], inputs="other")], "decoded": None},
        {"name": "d", "recipe": None, "runs": [make_run("d-1", 1.5, [1.0, 1.0])], "decoded": decoded, "budget": 7},
        {"name": "e", "recipe": None, "runs": [make_run("e-1", 1.5, [1.0, 1.0])], "decoded": None},
    ]
    entries[-1]["runs"][0]["training"]["answers"] = "anew"
    entries.append({"name": "f", "recipe": None, "runs": [make_run("f-1", 2.0, [5.0, 15.0])], "decoded": None})
    entries[-1]["runs"][0]["training"]["answers"] = "older"
    for entry in entries:
        (folder / f"{entry['name']}.json").write_text(json.dumps({"budget": 3_000_000} | entry))


def test_the_page_is_made_of_the_files(tmp_path: Path) -> None:
    write_entries(tmp_path)
    page = render(tmp_path, ["a", "b"])
    rows = {line.split(" | ")[0][2:]: line for line in page.splitlines() if line.startswith("| ")}
    assert "| 2.50M | 2 min | 5 | 1.50 | 4.00 | 2.50 [2.40, 2.70] |" in page
    assert "| 2.51 | 1.25× (1.20 to 1.31) |" in page
    assert "| 2.51 | 1.50×, once |" in page
    assert "| 1,500 | 3,333 | 5.00M | 3.00M | 1,375 | set 2 | 2 min |" in page, "steps, tokens of each, and of all"
    assert "| set 1 |" in rows["a-old"]
    assert "| set 3 |" in rows["e-1"], "answers sampled anew are told apart"
    assert "**Measured on other prompts than a: c.**" in page
    assert "**Trained on another number of tokens than a: d.**" in page
    assert "**Trained on other answers of the target than a: e, f.**" in page
    assert "a 3 of 4." in page
    assert page.count("1.25×") == 1, "what was decoded with another head than the tables have is left out"
    # Half the tokens per round on every prompt, so the interval has no width; other prompts are not compared.
    assert "| drafter | K | tau over a's at K 5, T=0 | tau over a's at K 5, T=1 |" in page
    assert "| b (tuned target) | 4 | -50.0% [-50.0%, -50.0%] | -50.0% [-50.0%, -50.0%] |" in page, (
        "as far as it reaches"
    )
    assert "| c | 5 | – | – |" in page
    assert "| e | 5 | – | – |" in page, "drafters of other answers are not compared"
    assert "| f | 5 | -20.0% [-20.0%, -20.0%] | -20.0%" in page, "one of older answers with the run on those"
    assert "| a | 0 | 5 | 2.50 | 2.50 [2.40, 2.70] |" in page
    assert "| a | 0 | 7 |" not in page, "what was not measured has no row"
    assert {"a-lr1", "a-lr2", "a-lr3", "b-1", "c-1"} <= set(rows)
    assert "| 1.90 | 2.00 [1.90, 2.20] |" in rows["a-lr1"]
    assert "[a.json](a.json) | `recipes/a.yaml`" in page
    assert "[b.json](b.json) | other 1.0" in page
    assert page.index("| a | 2.50M") < page.index("| b (tuned target) | 2.50M") < page.index("| c | 2.50M")
    assert render(tmp_path, ["b", "a"]).index("## Compared with b") > 0


def test_what_the_tables_show_stands_on_top(tmp_path: Path) -> None:
    write_entries(tmp_path)
    (tmp_path / "findings.md").write_text("## What it shows\n\nThat a wins.\n")
    page = render(tmp_path, ["a"])
    assert page.index("# Drafters side by side") < page.index("That a wins.") < page.index("## Overview")


def test_the_committed_page_is_that_of_its_files() -> None:
    if not (OUTPUT / "README.md").exists():
        pytest.skip("no results are committed yet")
    assert (OUTPUT / "README.md").read_text() == render(OUTPUT, [s.name for s in DRAFTERS])


def test_the_table_names_every_drafter_once() -> None:
    names = [name for drafter in DRAFTERS for name in (drafter.name, *drafter.run_names)]
    assert len(names) == len(set(names))
    assert DRAFTERS[0].run_names == ("eagle3-lr0.5", "eagle3-lr1", "eagle3-lr2")
    assert all((ROOT / drafter.recipe).exists() for drafter in DRAFTERS)


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["--only", "x"], "draft_model; single runs eagle3-lr0.5, "),
        (["--only", "x"], "--only x: the drafters are eagle3"),
        (["--budget", "0"], "--budget is '0'"),
    ],
)
def test_mistakes_are_one_sentence(further: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(further) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "again"), [("1", False), ("3", False), ("4", True)])
def test_more_repeats_are_decoded_again(asked: str, again: bool) -> None:
    options, _ = parse(["--repeats", asked], DRAFTERS)
    assert drafters_bench._few({"at": {"0": {"repeats": 3}, "1": {"repeats": 3}}}, options) == again


def test_the_command_in_the_files_names_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/here/bench.py", "--store", "/here/s", "--only", "eagle3", "--runs=/here/r"])
    assert drafters_bench._facts()["command"] == "python -m scripts.bench.drafters --only eagle3"


def test_what_is_left_of_the_words_overrides_every_recipe() -> None:
    options, overrides = parse(["--only", "eagle3", "--no-decode", "--evaluate.repeats", "1"], DRAFTERS)
    assert overrides == ("--evaluate.repeats", "1")
    assert (options.no_train, options.no_decode, options.only) == (False, True, ["eagle3"])
