"""`draftsmith verify` of a real export, against servers that answer as vLLM and llama-server do, right and wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from draftsmith.cli import verify
from draftsmith.cli.main import main
from draftsmith.eval.parity.bundle import Bundle, ParityPrompt, read_bundle, write_bundle
from tests.eval.engines.fake_server import Engine, serving
from tests.workplace import make_workplace, save_untrained

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the stages."""
    folder = make_workplace(tmp_path_factory.mktemp("verify"))
    head = save_untrained(folder)
    words = ["export", "--recipe", str(folder / "recipe.yaml"), "--output_dir", str(folder / "run")]
    assert main([*words, "--head", str(head)]) == 0
    return folder / "run" / "export" / "eagle3"


def replies(
    bundle: Bundle, kind: str, fault: str = "", *, told: bool = True, longer: int = 0, unasked: int = 0
) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """Answer as an engine with a fault does. told: with records of its drafts. longer: tokens that its template adds. unasked: those that
    it adds where a request has no chat_template_kwargs."""
    by_ids = {prompt.prompt_ids: number for number, prompt in enumerate(bundle.prompts)}

    def reply(asked: dict[str, Any]) -> tuple[int, Any]:
        if "messages" in asked:
            prompt = next(p for p in bundle.prompts if list(p.messages or ()) == asked["messages"])
            added = longer if "chat_template_kwargs" in asked else longer + unasked
            return 200, {"usage": {"prompt_tokens": len(prompt.prompt_ids) + added}}
        number = by_ids[tuple(asked["prompt"])]
        prompt: ParityPrompt = bundle.prompts[number]
        rounds = bundle.faults[fault][number] if fault else prompt.rounds
        drafted, accepted = [len(r) - 1 for r in rounds], [r[0] for r in rounds]
        if kind == "llama.cpp":
            counts = {"draft_n": sum(drafted), "draft_n_accepted": sum(accepted)}
            return 200, {"tokens": list(prompt.answer_ids), "timings": counts if told else {}}
        choice = {"token_ids": list(prompt.answer_ids)}
        if not told:
            return 200, {"choices": [choice]}
        histogram = [accepted.count(n) for n in range(bundle.num_speculative_tokens + 1)]
        said = {
            "num_spec_steps": len(rounds),
            "num_draft_tokens": sum(drafted),
            "num_accepted_draft_tokens": sum(accepted),
        }
        steps = {"per_step_drafted": drafted, "per_step_accepted": accepted, "acceptance_histogram": histogram}
        return 200, {"choices": [choice], "metrics": {"speculative_decoding": said | steps}}

    return reply


@pytest.mark.parametrize("kind", ["vLLM", "llama.cpp"])
def test_right_and_wrong_servers(kind: str, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, out = read_bundle(export), tmp_path / "verdict.json"
    size = sum(file.stat().st_size for file in (export / "parity").iterdir())
    assert size < 300_000
    assert {prompt.slice for prompt in bundle.prompts} == {"chat", "code"}
    assert len(bundle.faults) >= 10
    with serving(Engine(kind, reply=replies(bundle, kind))) as url:
        assert main(["verify", str(export), "--url", url, "--output", str(out)]) == 0
    assert "right: answers and drafts are those of the bundle" in capsys.readouterr().out
    fault = "K and one more"
    with serving(Engine(kind, reply=replies(bundle, kind, fault))) as url:
        assert main(["verify", str(export), "--url", f"{url}/v1", "--output", str(out)]) == 3
    verdict = json.loads(out.read_text())
    assert fault in verdict["causes"]
    assert verdict["right"] is False
    assert "one token more than the export says" in " ".join(capsys.readouterr().out.split())
    with serving(Engine(kind, reply=replies(bundle, kind, longer=2))) as url:
        assert main(["verify", str(export), "--url", url]) == 3
    assert "another chat template" in " ".join(capsys.readouterr().out.split())


def test_what_another_target_loses(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, out = export.parents[2] / "target", tmp_path / "swapped.json"
    served = shutil.copytree(own, tmp_path / "served")
    weights = load_file(served / "model.safetensors")
    for name in [name for name in weights if "mlp" in name]:
        weights[name] = weights[name] + 0.05 * torch.randn(
            weights[name].shape, generator=torch.Generator().manual_seed(0)
        )
    save_file(weights, served / "model.safetensors", {"format": "pt"})
    words = [
        "verify",
        str(export),
        "--target",
        str(own),
        "--served",
        str(served),
        "--weights",
        "int8",
        "--output",
        str(out),
    ]
    assert main(words) == 0
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert [share["thing"] for share in found["shares"]] == ["answers", "states", "head"]
    assert sum(share["lost"] for share in found["shares"]) == pytest.approx(found["tau"] - found["tau_served"])
    assert f"tau {found['tau']:.2f} with {own}, {found['tau_served']:.2f} with {served}" in printed
    assert found["differ"] > 0
    prompts = tmp_path / "prompts.jsonl"
    chats = [{"id": str(n), "messages": [{"role": "user", "content": "w3 w5 " * (n + 1)}]} for n in range(4)]
    prompts.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    rendered = list[Any]()
    real = verify.prepare_prompts
    monkeypatch.setattr(
        verify, "prepare_prompts", lambda *given, **how: rendered.append(how["template"]) or real(*given, **how)
    )
    folder = shutil.copytree(export, tmp_path / "export")
    write_bundle(folder, replace(read_bundle(export), template={"thinking": False}))
    assert main(["verify", str(folder), *words[2:], "--prompts", str(prompts)]) == 0
    assert rendered == [{"thinking": False}]
    capsys.readouterr()
    assert main([*words, "--prompts", str(prompts)]) == 0
    told = capsys.readouterr().out
    assert "4 prompts at temperature 0" in told
    assert "4 prompts tell nothing for certain: give 10 or more with --prompts" in told
    assert main(["verify", str(export), "--target", str(served), "--served", str(own)]) == 2
    assert "was trained for (fingerprint" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(served)
    assert main(words) == 2
    assert f"--served {served} has other tokens than --target {own}" in capsys.readouterr().err


def test_what_cannot_be_verified_is_refused(export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = read_bundle(export)
    engine = Engine(reply=replies(bundle, "vLLM", told=False), metrics=False)
    old = shutil.copytree(export, tmp_path / "old", ignore=shutil.ignore_patterns("parity"))
    with (
        serving(engine) as url,
        serving(Engine(model="models/another", reply=engine.reply)) as another,
        serving(Engine(owner="tensorrt_llm")) as tensorrt,
    ):
        cases = {
            "is neither vLLM nor llama-server nor SGLang": [str(export), "--url", tensorrt],
            "start it with --per-request-spec-decode-metrics": [str(export), "--url", url],
            " or eagle3: start it with": [str(export), "--url", another],
            "has no parity/bundle.json": [str(old), "--url", url],
            "is no folder: name that of an export": [str(old / "nothere"), "--url", url],
            "verify takes one export": ["--url", url],
            "either --url": [str(export)],
            "choose vllm or llama.cpp": [str(export), "--engine", "sglang"],
            "give --home FOLDER": [str(export), "--engine", "vllm"],
            "so give --target with the files of that one": [str(export), "--served", str(export.parents[2] / "target")],
            "--prompts goes with --served alone": [str(export), "--url", url, "--prompts", "x.jsonl"],
            "--weights is int8: give one of": [str(export), "--url", url, "--weights", "int8"],
            "does not answer": [str(export), "--url", "http://127.0.0.1:9"],
        }
        for words, given in cases.items():
            capsys.readouterr()
            assert main(["verify", *given]) == 2, words
            said = capsys.readouterr().err
            assert words in said
            assert said.count("\n") == 1


def test_an_export_is_made_again_where_prompts_are_rendered_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its README starts engines so, and its bundle is asked so."""
    folder = make_workplace(tmp_path)
    head = save_untrained(folder)
    (folder / "other.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{{ kind }}<assistant>"
    )
    words = [
        "export",
        "--recipe",
        str(folder / "recipe.yaml"),
        "--output_dir",
        str(folder / "run"),
        "--head",
        str(head),
    ]
    words += ["--data.chat_template", str(folder / "other.jinja")]
    made = folder / "run" / "export" / "eagle3"
    for kind in ("a", "b"):
        assert main([*words, "--data.template", json.dumps({"kind": kind})]) == 0
        assert read_bundle(made).template == {"kind": kind}
        assert json.dumps({"kind": kind}) in (made / "README.md").read_text()
    assert "export: made again" in capsys.readouterr().err
    assert main([*words, "--data.template", '{"kind": "b"}']) == 0
    assert capsys.readouterr().err.endswith(f"export: reusing {made}\n")


def test_a_server_that_takes_no_messages_is_said_to(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its template may be another one, and nobody knows."""
    plain = replies(read_bundle(export), "vLLM")
    reply = lambda asked: (400, {"error": "no template"}) if "messages" in asked else plain(asked)  # noqa: E731
    with serving(Engine("vLLM", reply=reply)) as url:
        assert main(["verify", str(export), "--url", url]) == 0
    told = capsys.readouterr().err
    assert "/v1/chat/completions (status 400)" in told
    assert "So whether chats are rendered as the head learned them is not known" in told


@pytest.mark.parametrize("unasked", [0, 4])
def test_servers_are_sent_what_the_template_was_given_and_no_penalty(
    unasked: int, export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What vLLM is not told it takes from the target's generation_config.json. Users' requests name nothing for the template."""
    known = read_bundle(export)
    folder = shutil.copytree(export, tmp_path / "export")
    write_bundle(folder, replace(known, template={"enable_thinking": False}))
    bundle = read_bundle(folder)
    engine = Engine("vLLM", reply=replies(bundle, "vLLM", unasked=unasked))
    with serving(engine) as url:
        assert main(["verify", str(folder), "--url", url]) == 0
    *chats, plain = [one for one in engine.asked if "messages" in one]
    assert chats
    assert all(one["chat_template_kwargs"] == {"enable_thinking": False} for one in chats)
    assert "chat_template_kwargs" not in plain
    said = 'become {} tokens, here {}): start the server with {{"enable_thinking": false}} (vLLM\'s --default'
    size = len(bundle.prompts[0].prompt_ids)
    assert (said.format(size + 4, size) in capsys.readouterr().err) == bool(unasked)
    assert all(one["repetition_penalty"] == 1.0 for one in engine.asked if "messages" not in one)
    assert main(["verify", str(folder), "--url", "http://x", "--home", "y"]) == 2


def test_vllm_is_not_asked_of_another_target_than_it_loads(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in speculators' form names it, whatever --target says."""
    folder = export.parents[2]
    words = [
        "--recipe",
        str(folder / "recipe.yaml"),
        "--head",
        str(folder / "head"),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    assert main(["export", *words, "--export.layout", "eagle3_speculators"]) == 0
    other = shutil.copytree(folder / "target", tmp_path / "other")
    asked = [
        "verify",
        str(tmp_path / "run" / "export" / "eagle3_speculators"),
        "--engine",
        "vllm",
        "--home",
        str(tmp_path),
    ]
    assert main([*asked, "--target", str(other)]) == 2
    assert f"names, {folder / 'target'}, not --target {other}: give that one" in capsys.readouterr().err
    assert main([*asked, "--target", str(folder / "target")]) == 2  # as there is no vLLM
    assert "not --target" not in capsys.readouterr().err


def test_a_target_with_an_adapter_is_asked_by_its_name(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(export, tmp_path / "export")
    write_bundle(folder, replace(read_bundle(export), served_as="tuned"))
    with serving(Engine("vLLM", reply=replies(read_bundle(folder), "vLLM"))) as url:
        assert main(["verify", str(folder), "--url", url]) == 2
    assert "not tuned: start it with" in capsys.readouterr().err
    assert main(["verify", str(folder), "--engine", "vllm", "--home", "h", "--target", "t"]) == 2
    assert "drafts for a target with an adapter, which --engine does not start" in capsys.readouterr().err
