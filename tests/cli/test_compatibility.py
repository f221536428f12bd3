"""Whether a head belongs to a target: what the doctor says, and what an evaluation on another target warns of."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.cli.compatibility import find_target_folder
from draftsmith.cli.main import main
from draftsmith.data.embedded import SHIPPED
from draftsmith.eval.report.report import render_html, render_markdown
from draftsmith.eval.results.result import read_result
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.record import read_record
from draftsmith.target.target import load_target
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model
from tests.workplace import make_workplace, options, save_untrained

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
PASSPORT = {"files": "ok", "drafts": "ok", "trained": "note", "measured": "note"}
"""The lines of an export that no run made."""
LINES = ("head", "sizes", "config", "embeddings", "lm_head", "weights", "tokenizer", "template", "eos")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a head for it in a run and as an export, and `upgraded`: its last layer trained on, another template."""
    folder = make_workplace(tmp_path_factory.mktemp("fit"), prompts=2)
    shutil.copytree(save_untrained(folder), folder / "run" / "train" / "best")
    target = load_target(str(folder / "target"))
    export_head(load_head(folder / "head", target), target, folder / "export")
    shutil.copytree(folder / "target", folder / "upgraded")
    weights = folder / "upgraded" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.7.mlp.up_proj.weight"] += 0.01
    save_file(tensors, weights, {"format": "pt"})
    template = folder / "upgraded" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<s>"))
    tiny_model("llama", hidden_size=32).save_pretrained(folder / "small")
    return folder


def diagnose(head: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str], str]:
    """Return the exit code, the state of every line, and the whole text."""
    code = main(["doctor", "--head", str(head), "--target", str(target)])
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines() if line[:4].strip() in ("ok", "note", "bad")]
    return code, {words[1]: words[0] for words in lines}, text


@pytest.mark.parametrize("head", ["run", "run/train/best", "export"])
def test_a_head_fits_its_target(head: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, states, text = diagnose(place / head, place / "target", capsys)
    assert (code, states) == (0, dict.fromkeys(LINES, "ok") | (PASSPORT if head == "export" else {}))
    assert "fits" in text.splitlines()[-1]


@pytest.mark.parametrize("head", ["run", "export"])
def test_another_target_is_told_with_what_it_means(head: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, states, text = diagnose(place / head, place / "upgraded", capsys)
    assert code == 1
    assert [name for name, state in states.items() if state != PASSPORT.get(name, "ok")] == ["weights", "template"]
    assert "same embeddings and lm_head, as after a fine-tune" in text
    assert text.splitlines()[-1].endswith("as it is now: weights, template.")
    code, states, text = diagnose(place / head, place / "small", capsys)
    assert (code, states["sizes"]) == (1, "bad")
    assert "32 hidden units where the head needs" in text


def test_a_target_of_the_hub_is_looked_up_in_the_cache(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models--org--model"
    shutil.copytree(place / "target", model / "snapshots" / "0123abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    code, states, text = diagnose(place / "run", Path("org/model"), capsys)
    assert (code, states) == (0, dict.fromkeys(LINES, "ok"))
    assert "fits org/model" in text


def test_other_eos_ids_are_a_note(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / "target", tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    code, states, text = diagnose(place / "export", tmp_path / "target", capsys)
    assert (code, states["eos"]) == (0, "note")
    assert "[2, 5] instead of [2]" in text


def test_without_a_record_only_sizes_are_compared(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "export", tmp_path / "export")
    (tmp_path / "export" / "draftsmith.json").unlink()
    code, states, text = diagnose(tmp_path / "export", place / "upgraded", capsys)
    assert (code, states) == (0, dict.fromkeys(LINES, "note") | {"head": "ok", "sizes": "ok"})
    assert text.count("not recorded with this head") == len(LINES) - 2
    assert diagnose(tmp_path / "export", place / "small", capsys)[0] == 1


def test_a_record_of_an_earlier_version(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fingerprint says that the parts fit; where it differs it does not say which."""
    shutil.copytree(place / "run", tmp_path / "run")
    file = tmp_path / "run" / "train" / "best" / "config.json"
    config = json.loads(file.read_text())
    old = ("path", "fingerprint", "vocab_size", "hidden_size", "num_layers", "architectures")
    file.write_text(json.dumps(config | {"target": {key: config["target"][key] for key in old}}))
    known = ("head", "sizes", "config", "embeddings", "lm_head", "weights")
    expected = dict.fromkeys(LINES, "note") | dict.fromkeys(known, "ok")
    assert diagnose(tmp_path / "run", place / "target", capsys)[:2] == (0, expected)
    states = diagnose(tmp_path / "run", place / "upgraded", capsys)[1]
    assert [name for name, state in states.items() if state == "bad"] == ["weights"]
    assert states["lm_head"] == "note"


def test_where_nothing_can_be_compared_nothing_fits(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    save_file({"0.0.linear.weight": torch.zeros(2, 2)}, tmp_path / "head" / "medusa_lm_head.safetensors")
    code, _, text = diagnose(tmp_path / "head", place / "target", capsys)
    assert code == 1
    assert "Nothing is recorded" in text


def test_a_mistake_is_one_sentence(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / "export", cut := tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-10])
    head, target = ["--head", str(place / "export")], ["--target", str(place / "target")]
    for words, said in (
        (["--head", str(cut), *target], "model.safetensors is cut short or damaged"),
        (["--head", str(tmp_path / "nowhere"), *target], "no folder"),
        (["--head", str(place / "target"), *target], "is the target itself"),
        ([*head, "--target", str(place / "export")], "is a draft head"),
        ([*head, "--target", str(tmp_path / "nowhere")], "neither a folder nor a Hub name"),
        ([*head, "--target", "nobody/nothing"], "fetch it first"),
        ([*head, "--target", str(tmp_path)], "has no config.json"),
        (head, "--target is missing"),
        ([*head, *target, "--recipe", "x"], "but not --recipe"),
    ):
        assert main(["doctor", *words]) == 2
        printed = capsys.readouterr()
        assert printed.err.count("draftsmith: ") == 1
        assert said in printed.err
        assert not printed.out


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_a_pickle_that_is_cut_short_is_not_complete(
    file: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1}' if "medusa" in file else '{"draft_vocab_size": 8}')
    torch.save({"0.0.linear.weight": torch.zeros(64, 64)}, tmp_path / file)
    words = ["doctor", "--head", str(tmp_path), "--target", str(place / "target")]
    assert main(words) in (0, 1)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    capsys.readouterr()
    assert main(words) == 2
    assert f"The weights {tmp_path / file} are damaged or cut short" in capsys.readouterr().err


def test_the_script_has_the_same_options(place: Path) -> None:
    command = [sys.executable, "scripts/doctor.py", "--head", place / "run", "--target", place / "upgraded"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "weights, template" in result.stdout
    # -S: as if nothing were installed.
    result = subprocess.run(
        [command[0], "-S", "-E", *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "without options" in result.stderr
    assert "Traceback" not in result.stderr


def words(place: Path, target: str, run: Path) -> list[str]:
    """Options of an evaluation of the head on two prompts."""
    fewer = {
        "temperatures": "[0.0]",
        "max_new_tokens": "6",
        "repeats": "1",
        "num_speculative_tokens": "1",
        "max_k": "1",
    }
    fewer |= {"generate": "false"}
    own = [word for key, value in fewer.items() for word in (f"--evaluate.{key}", value)]
    head = ["--head", str(place / "run" / "train" / "best"), "--target.path", str(place / target)]
    return [*options(place, run), *head, *own]


def test_an_evaluation_on_another_target_warns_wherever_its_numbers_go(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = ["--evaluate.beside.export", str(place / "run")]
    for target, warnings in (("target", 0), ("upgraded", 2)):
        run = tmp_path / target
        assert main(["evaluate", *words(place, target, run), *beside, "--no-decode"]) == 0
        printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: the head")]
        result = read_result(run / "simulation" / "t0" / "result.json")
        assert set(result.drafters) == {"eagle3", "export"}
        # Both heads are one folder, and it is loaded several times: each warning is said once.
        assert len(printed) == len(result.warnings) == warnings
        assert printed == [f"warning: {text}" for text in result.warnings]
        for text in (render_html([result]), (run / "simulation" / "report.md").read_text()):
            assert text.count("Warning: the head") == warnings
    assert "the same embeddings and lm_head, as after a fine-tune" in result.warnings[0]
    assert "chat template" in result.warnings[1]
    assert render_markdown([result, result]).count("Warning: the head") == 2  # the same ones once


@pytest.mark.slow
def test_a_decoded_evaluation_on_another_target_is_exact_and_warns(place: Path, tmp_path: Path) -> None:
    assert main(["evaluate", *words(place, "upgraded", tmp_path / "run")]) == 0
    result = read_result(tmp_path / "run" / "evaluation" / "t0" / "result.json")
    lossless = result.drafters["eagle3"].overall.lossless
    assert lossless is not None
    assert lossless.equal == lossless.checked == 2
    assert len(result.warnings) == 2


def test_sizes_are_refused_whatever_is_asked(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / "target", tmp_path / "small")
    tiny_model("llama", hidden_size=32, vocab_size=len(tiny_tokenizer())).save_pretrained(tmp_path / "small")
    options = [*words(place, "target", tmp_path / "run"), "--target.path", str(tmp_path / "small")]
    assert main(["evaluate", *options]) == 2
    assert "has 32 hidden units where the head needs 64" in capsys.readouterr().err


def test_an_export_never_lies_about_its_target(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other weights are refused; another template is reported, and the record names the one trained with."""
    assert main(["export", *words(place, "upgraded", tmp_path / "refused")]) == 2
    assert "The weights of the target" in capsys.readouterr().err
    assert not (tmp_path / "refused" / "export").exists()
    shutil.copytree(place / "upgraded", tmp_path / "template")
    shutil.copy(place / "target" / "model.safetensors", tmp_path / "template")
    options = [*words(place, "target", tmp_path / "run"), "--target.path", str(tmp_path / "template")]
    assert main(["export", *options]) == 0
    assert "another chat template" in capsys.readouterr().err
    # A file that somebody changed since is named.
    export = tmp_path / "run" / "export" / "eagle3"
    (export / "config.json").write_text((export / "config.json").read_text() + " ")
    code, states, text = diagnose(export, place / "target", capsys)
    assert (code, states["files"]) == (1, "bad")
    assert "changed since the export: config.json" in text
    recorded = read_record(tmp_path / "run" / "export" / "eagle3")
    assert recorded == read_record(place / "run" / "train" / "best")


def test_the_embedded_target_is_named_as_in_recipes() -> None:
    assert find_target_folder("embedded") == SHIPPED
