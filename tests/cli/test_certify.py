"""`draftsmith certify` from words to files, and what it refuses."""

import json
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.machine import environment_json
from tests.eval.certificate.test_served import engine
from tests.eval.engines.fake_server import serving
from tests.workplace import fails, make_workplace, options, save_untrained

pytestmark = pytest.mark.full
HOT = ["--evaluate.temperatures", "[2.0]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_workplace(tmp_path_factory.mktemp("certify"))
    save_untrained(folder)
    return folder


def words(place: Path, *own: str) -> list[str]:
    return ["certify", *options(place, place / "run"), "--head", str(place / "head"), *own]


def interrupted(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A certificate whose samples are drawn, and which was ended before it was made; return the command."""
    asked = [*words(place, *HOT), "--distance", "0.35", "--prompts", "2"]
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.cli.certify.make_certificate", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(asked) == 130
    return asked


def test_a_certificate_and_its_page(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a head that has learnt nothing; interrupted, and gone on with from what was sampled."""
    monkeypatch.chdir(tmp_path)
    asked = interrupted(place, monkeypatch)
    samples = Path("certificate.journal").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.decoder.loop.Loop.round", None)
        code = main(asked)
    assert samples
    assert not Path("certificate.journal").exists()
    told = json.loads(Path("certificate.json").read_text())
    assert code == (0 if told["given"] else 3)
    assert [one["system"] for one in told["greedy"]] == ["eagle3"]
    assert len(told["tested"][0]["controls"]) == 5
    assert told["about"]["head"]
    assert told["about"]["prompts"] == ["p0", "p1"]
    assert told["tested"][0]["checks"][0]["samples"] == told["samples"]
    text = Path("certificate.md").read_text()
    assert text in capsys.readouterr().out
    assert len(text.splitlines()) < 40
    for words_of in ("Losslessness certificate", "4 greedy answers checked in float32", "| wrong residual |"):
        assert words_of in text


def test_two_servers(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "served.json"
    asked = [
        "certify",
        *options(place, tmp_path / "run"),
        "--distance",
        "0.4",
        "--level",
        "0.0001",
        "--prompts",
        "2",
        "--output",
        str(output),
    ]
    with serving(engine("llama.cpp", draft_n=4, draft_n_accepted=3)) as drafts, serving(engine("vLLM")) as alone:
        assert main([*asked, "--model", "target", "--url", drafts, "--url", alone]) == 0
    told = json.loads(output.read_text())
    assert told["given"]
    assert not told["tested"][0]["controls"]
    assert told["about"]["subject"].startswith(f"The server {drafts} against {alone}")
    assert "cannot be spoiled on purpose" in output.with_suffix(".md").read_text()


@pytest.mark.parametrize("name", ["README.md", "README.journal"])
def test_files_of_others_beside_the_certificate_stay(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("mine\n")
    assert f"--output would replace {name}, which draftsmith did not write" in fails(
        words(place, *HOT, "--output", "README.json"), capsys
    )
    assert Path(name).read_text() == "mine\n"


def test_samples_of_another_version_are_drawn_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = interrupted(place, monkeypatch)
    made = environment_json()
    with monkeypatch.context() as patch:
        patch.setattr(
            "draftsmith.cli.certify.environment_json",
            lambda: made | {"versions": made["versions"] | {"draftsmith": "another"}},
        )
        patch.setattr("draftsmith.decoder.loop.Loop.round", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(asked) == 130, "it is sampled again"


def test_what_cannot_be_certified_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typical = "[{acceptance: typical}]"
    for own, said in (
        (["--evaluate.temperatures", "[0.0]"], "evaluate.temperatures holds 0 alone"),
        (["--evaluate.drafts", typical], "typical (lossy), whose acceptance is lossy by design"),
        (["--url", "http://localhost:1"], "--url is given 1 times (http://localhost:1): give the server that drafts"),
        (["--prompts", "1", *HOT], "certify takes two prompts or more"),
        (["--model", "m"], "--model is what servers call the target"),
        (["--level", "1"], "--level is '1': give a number above 0 and below 1"),
        (["--output", "a.txt"], "--output is a.txt, which has another ending"),
    ):
        assert said in fails(words(place, *own), capsys)
    urls = ["--url", "http://localhost:1", "--url", "http://localhost:2"]
    assert "--head is for this decoder" in fails(words(place, *urls), capsys)
    twice = ["--url", "http://localhost:1", "--url", "http://localhost:1/"]
    assert "--url is given 2 times (http://localhost:1, http://localhost:1/): give" in fails(
        words(place, *twice), capsys
    )
