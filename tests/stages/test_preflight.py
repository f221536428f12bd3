"""What is refused before hours of work, and what is only said."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.cli.main import main
from draftsmith.data.batch import Tokenized
from draftsmith.data.features.index import read_index
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.registry import Method, methods
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages import preflight as preflight_module
from draftsmith.stages.data import answer_inputs
from draftsmith.stages.evaluation import prompts_of
from draftsmith.stages.preflight import preflight
from draftsmith.stages.session import Session, choose_device
from draftsmith.stages.training import initial_head, train_inputs
from draftsmith.target.target import Target, load_target
from draftsmith.train.process import World
from tests.heads.blocks import make_head
from tests.helpers import GEMMA, save_target, tiny_tokenizer
from tests.models import tiny_model
from tests.pretended_gpu.cuda import pretended_gpu
from tests.workplace import fails, make_workplace, options

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature, with a draft model of a short context."""
    folder = make_workplace(tmp_path_factory.mktemp("preflight"))
    tokenizer = tiny_tokenizer()
    short = tiny_model("llama", num_hidden_layers=2, vocab_size=len(tokenizer), max_position_embeddings=64)
    short.save_pretrained(folder / "short")
    tokenizer.save_pretrained(folder / "short")
    (folder / "wide.json").write_text('{"name": "wide", "choices": [[0], [900000]]}')
    line = {"id": "p1", "slice": "overall", "messages": [{"role": "user", "content": "ab"}]}
    (folder / "overall.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def session_of(workplace: Path, tmp_path: Path, method: str, head: dict[str, Any], *words: str) -> Session:
    """A session of the miniature's recipe with another head."""
    recipe = yaml.safe_load((workplace / "recipe.yaml").read_text()) | {"method": method, "head": head}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Session(
        parse_recipe(["--recipe", str(tmp_path / "recipe.yaml"), f"--output_dir={tmp_path / 'run'}", *words])
    )


@pytest.mark.parametrize("regenerate", ["true", "false"])
def test_rows_that_the_template_refuses_are_left_out_where_asked(
    regenerate: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether they are among the first, which are looked at before the target is loaded, or behind them."""

    def said(**turns: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in turns.items()]

    (tmp_path / "strict.jinja").write_text(GEMMA)
    rows = [{"id": f"r{i}", "messages": said(user=f"ask {i}", assistant="Yes.")} for i in range(70)]
    for row in (rows[2], rows[68]):
        row["messages"] = said(system="Help.") + row["messages"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["extract", *options(workplace, tmp_path / "run"), "--data.sources", f"[{tmp_path / 'rows.jsonl'}]"]
    words += ["--data.chat_template", str(tmp_path / "strict.jinja"), "--answers.regenerate", regenerate]
    told = fails(words, capsys)
    assert "sample r2: it cannot take messages of role 'system'" in told
    assert "with data.on_refused: drop such conversations are left out" in told
    assert not (tmp_path / "run").exists()
    assert main([*words, "--data.on_refused", "drop", "--answers.max_new_tokens", "4"]) == 0
    told = capsys.readouterr().err
    assert "data.on_refused: 2 of 70 conversations (r2, r68) are left out" in told
    assert "no room for an answer" not in told
    ids = [sample.sample_id for sample in read_index(tmp_path / "run" / "features").samples]
    assert ids == [f"r{i}" for i in range(70) if i not in (2, 68)]
    assert main([*words, "--data.on_refused", "drop", "--answers.max_new_tokens", "4"]) == 0
    assert "data.on_refused: 2 of 70" in capsys.readouterr().err  # said again with what was stored


def test_prompts_that_are_learned_are_said(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": f"r{i}", "messages": [{"role": "user", "content": f"ask {i}"}]} for i in range(30)]
    answered = [row | {"messages": [*row["messages"], {"role": "assistant", "content": "Yes."}]} for row in rows]
    for name, some in (("learned", answered[:20]), ("both", rows[15:]), ("others", rows[20:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    for name, said in (("both", True), ("others", False)):
        words = [f"--data.sources=[{tmp_path / 'learned.jsonl'}]", f"--evaluate.prompts=[{tmp_path / f'{name}.jsonl'}]"]
        preflight(session_of(workplace, tmp_path, "eagle3", {}, *words, "--data.heldout=4"), "run")
        told = "5 of the 15 prompts of evaluate.prompts (r15, r16, r17, ...) are in data.sources, too"
        assert (told in capsys.readouterr().err) == said


@pytest.mark.parametrize("method", ["dflash", "dspark", "peagle"])
def test_a_mask_token_that_texts_hold_is_said(
    method: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [Tokenized(torch.tensor([5, 7, 9]), torch.ones(3, dtype=torch.bool), "line 4", "chat")]
    for token, said in ((7, True), (8, False)):
        session = session_of(workplace, tmp_path, method, {"mask_token_id": token})
        initial_head(session, None, None, samples)
        assert ("head.mask_token_id is 7, which texts have (line 4 for one)" in capsys.readouterr().err) == said


def test_a_base_model_takes_a_chat_template_that_counts_by_what_it_says(workplace: Path, tmp_path: Path) -> None:
    """Answers are made again for another template, not for another place of the same."""
    shutil.copytree(workplace / "short", tmp_path / "base")
    tiny_tokenizer(None).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    plain = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    found = []
    for name, text in (("one", plain), ("two", plain), ("three", f"{plain} ")):
        (tmp_path / f"{name}.jinja").write_text(text)
        words = ["--target.path", str(tmp_path / "base"), "--data.chat_template", str(tmp_path / f"{name}.jinja")]
        found.append(answer_inputs(session_of(workplace, tmp_path, "medusa", {"num_heads": 2}, *words)))
    assert found[0] == found[1] != found[2]
    session = session_of(workplace, tmp_path, "medusa", {"num_heads": 2}, *words[:2])
    with pytest.raises(UserError, match=r"no chat template: name a file with one in data.chat_template"):
        _ = session.tokenizer


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "wizard", "content": "Four."}, "line 1: the role 'wizard' is unknown"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
            "the call of 'add' is not in",
        ),
    ],
)
@pytest.mark.parametrize("regenerate", ["true", "false"])
def test_data_that_cannot_be_read_are_said_before_the_target_is_loaded(
    turn: dict[str, Any], said: str, regenerate: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    messages = [
        {"role": "user", "content": "2+2?"},
        turn,
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "4"},
    ]
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for _ in range(40)))
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    words = [
        f"--data.sources=[{rows}]",
        f"--data.chat_template={tmp_path / 'plain.jinja'}",
        f"--answers.regenerate={regenerate}",
    ]
    session = session_of(workplace, tmp_path, "medusa", {"num_heads": 2}, *words)
    monkeypatch.setattr(Session, "load_target", lambda *_: pytest.fail("the target is loaded"))
    with pytest.raises(UserError, match=said):
        preflight(session, "train")


def test_chains_shorter_than_asked_for_are_said(workplace: Path, tmp_path: Path) -> None:
    session = session_of(workplace, tmp_path, "medusa", {"num_heads": 2}, "--evaluate.drafts", "[{tree: chain}]")
    preflight(session, "run")
    asked = session.recipe.evaluate.num_speculative_tokens
    assert session.warnings == [
        f"evaluate.num_speculative_tokens is {asked}, but medusa drafts 2 tokens at most: its chains are measured with 2."
    ]


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("MixtralForCausalLM", ("--export.layout=eagle3_llama_cpp",), None),
        (
            "Gemma3ForCausalLM",
            (),
            "warning: in the layout eagle3 such heads draft for no target of the class Gemma3ForCausalLM in vLLM",
        ),
    ],
)
def test_engines_that_will_not_draft_for_the_target_are_named(
    kind: str,
    words: tuple[str, ...],
    said: str | None,
    workplace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before any training, by the class that config.json names."""
    shutil.copytree(workplace / "target", tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"architectures": [kind]}))
    for command in ("run", "train"):
        head = {"layer_ids": [2, 4, 6]}
        preflight(
            session_of(workplace, tmp_path, "eagle3", head, f"--target.path={tmp_path / 'target'}", *words), command
        )
        found = capsys.readouterr().err
        assert ("such heads" in found) == (said is not None)
        assert said is None or re.search(said, found)


def test_a_model_to_start_from_counts_by_its_weights_and_not_by_its_place(workplace: Path, tmp_path: Path) -> None:
    def inputs(name: str) -> dict[str, Any]:
        words = ("--answers.regenerate=false", "--features.source=online")
        return train_inputs(
            session_of(workplace, tmp_path, "draft_model", {"init_from": str(workplace / name)}, *words)
        )

    shutil.copytree(workplace / "short", workplace / "moved")
    assert inputs("moved") == inputs("short")
    weights = load_file(workplace / "moved" / "model.safetensors")
    save_file(
        weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, workplace / "moved" / "model.safetensors"
    )
    assert inputs("moved")["head"] != inputs("short")["head"]


@pytest.mark.parametrize(("kind", "limit"), [("longrope", 100), ("dynamic", 120)])
def test_rotary_frequencies_that_change_with_the_length_of_a_pass(
    kind: str, limit: int, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": kind, "original_max_position_embeddings": 100, "factor": 2.0}
    own = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    tokenizer = tiny_tokenizer()
    model = tiny_model(
        "llama",
        vocab_size=len(tokenizer),
        head_dim=16,
        max_position_embeddings=200 if kind == "longrope" else 120,
        rope_parameters=rope | own,
    )
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    session = session_of(workplace, tmp_path, "eagle3", {}, f"--target.path={tmp_path / 'target'}")
    preflight(session, "train")
    assert session.target.context_length == limit
    said = f"warning: the context of {tmp_path / 'target'} ends at 100 (past that all its rotary frequencies change"
    assert (said in capsys.readouterr().err) == (kind == "longrope") == bool(session.warnings), "config.json names 120"


@pytest.mark.parametrize(("asked", "said"), [(256, True), (128, False)])
def test_a_max_length_past_the_targets_positions_is_said(
    asked: int, said: bool, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target", max_position_embeddings=128)
    words = (f"--target.path={tmp_path / 'target'}", f"--data.max_length={asked}")
    preflight(session_of(workplace, tmp_path, "eagle3", {}, *words), "train")
    told = (
        "data.max_length is 256, but the target " in (err := capsys.readouterr().err)
        and "set data.max_length to 128" in err
    )
    assert told == said


def test_prompts_that_are_left_out_are_said_once_and_stay_with_the_results(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [json.loads(line) for line in (workplace / "prompts.jsonl").read_text().splitlines()]
    prompts[0]["messages"][0]["content"] *= 2000
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    session = session_of(workplace, tmp_path, "eagle3", {}, f"--evaluate.prompts=[{tmp_path / 'prompts.jsonl'}]")
    preflight(session, "run")
    requests = prompts_of(session, session.target).requests
    said = f"1 of {len(prompts)} prompts are too long for the target and are left out: give shorter ones in evaluate.prompts, or lower evaluate.max_k."
    assert len(requests) == len(prompts) - 1
    assert session.warnings == [said]
    assert capsys.readouterr().err.count(said) == 1


BF16 = """
AVX2   --train.precision=bf16                            | set train.precision to "no".
AVX2   --train.precision=no --target.dtype=bfloat16      | set target.dtype to float32.
AVX2   --train.precision=bf16 --evaluate.dtype=bfloat16  | set train.precision to "no" and evaluate.dtype to float32.
AVX2   --train.precision=no                              |
AVX512 --train.precision=bf16                            |
"""


@pytest.mark.parametrize("row", BF16.strip().splitlines())
def test_bf16_on_a_processor_without_it_is_warned_of(
    row: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (capability, *words), expected = (part.split() for part in row.split("|"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    preflight(session_of(workplace, tmp_path, "medusa", {}, "--target.device=cpu", *words), "run")
    found = [line for line in capsys.readouterr().err.splitlines() if "emulates bf16" in line]
    assert [line.rsplit("or more: ")[-1] for line in found] == ([" ".join(expected)] if expected else [])


EAGER_HEAD = "The head's attention runs without the GPU's flash kernel (it takes no float32) and keeps all scores, "
EAGER_TARGET = "The target's attention is eager (target.attn_implementation is eager) and keeps all scores, "


@pytest.mark.parametrize(
    ("command", "words", "free", "said"),
    [
        # 3 steps, 2 rows, 4 heads, and the 126 tokens of a row that can be learned from, each with each
        ("train", "", 10**9, f"warning: {EAGER_HEAD}1.52 MB or more for 2 rows of 128 tokens, which is slow: set train."),
        ("train", "", 10**6, f"{EAGER_HEAD}1.52 MB or more for 2 rows of 128 tokens, but cuda:0 has 1 MB free: set train.precision to "
         "bf16, or lower train.rows or train.row_tokens."),
        ("train", "--train.precision=bf16", 10**6, None),
        ("extract", "", 10**6, None),
        ("extract", "--target.attn_implementation=eager", 10**9, f"warning: {EAGER_TARGET}262 KB or more for a text of 128 tokens, which"),
        ("extract", "--target.attn_implementation=eager", 10**5, f"{EAGER_TARGET}262 KB or more for a text of 128 tokens, but cuda:0 has "
         "100 KB free: set it to sdpa, or lower data.max_length."),
    ],
)  # fmt: skip
def test_attention_that_keeps_its_scores_on_a_gpu_is_said(
    command: str, words: str, free: int, said: str | None, workplace: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pretended_gpu():
        monkeypatch.setattr(preflight_module, "available_memory", lambda device: free)
        session = session_of(
            workplace, tmp_path, "eagle3", {"ttt_steps": 3, "head_dim": 16}, "--target.device=cuda", *words.split()
        )
        if said is not None and not said.startswith("warning"):
            with pytest.raises(UserError) as refused:
                preflight(session, command)
            assert str(refused.value) == said
            return
        preflight(session, command)
    printed = capsys.readouterr().err
    assert ("attention" in printed) == (said is not None)
    assert said is None or said in printed


@pytest.mark.parametrize(("backend", "module"), [("trackio", "trackio"), ("mlflow", "sqlalchemy")])
def test_a_dashboard_that_is_not_installed(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, module: str
) -> None:
    monkeypatch.setattr("draftsmith.train.trackers.find_spec", lambda name: None if name == module else name)
    session = session_of(workplace, tmp_path, "medusa", {}, f"--tracking.backends=[{backend}]")
    with pytest.raises(UserError, match=rf"names {backend}, but the package {module} is .*draftsmith\[trackers\]"):
        preflight(session, "train")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["draft_model", "peagle"])
def test_sizes_that_are_too_large_together_are_refused_by_arithmetic(
    method: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is in its range; nothing is allocated."""
    build = methods()[method].build

    def without_memory(options: Any, target: Target, vocab: Tensor | None) -> DraftHead:
        return build(options, target, vocab) if target.device.type == "meta" else pytest.fail("it is built")

    monkeypatch.setattr(Method, "build", property(lambda self: without_memory))
    head = {"hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 64}
    head |= {"train_embeddings": True} if method == "peagle" else {}
    said = (
        rf"The {method} head of this recipe has [\d,]+ weights, [\d.]+ TB in float32, but this machine has [\d.]+ [GT]B"
    )
    with pytest.raises(UserError, match=said):
        preflight(session_of(workplace, tmp_path, method, head), "train")


def test_deepspeed_is_told_that_the_run_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it warns, amid the progress of training, that it found no GPU."""
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    choose_device("cpu")
    assert os.environ["DS_ACCELERATOR"] == "xpu", "the user's own word"
    monkeypatch.delenv("DS_ACCELERATOR")
    choose_device("cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"


WIDE_HYDRA = {"num_heads": 2, "num_layers": 4}
REFUSED = r"""
run   eagle3 --evaluate.max_k=5000                             | after a draft of 5000: give shorter prompts, or lower evaluate.max_k
train eagle3 --data.template.enable_thinking=false             | data.template names 'enable_thinking', which
train eagle3 --target.device=gpu                               | target.device is 'gpu': it is auto, cpu, cuda or cuda:N
train eagle3 --head.draft_vocab_size=1                         | draft_vocab_size
train medusa --features.layer_ids=[1,3,5,77]                   | ^features\.layer_ids .*77 is out of range
train eagle3 --output_dir={work}/chat.jsonl/run                | ^output_dir is .*, but .*chat.jsonl is a file: name a folder\.$
train eagle3 --data_dir={work}/chat.jsonl/run                  | ^data_dir is .*, but .*chat.jsonl is a file: name a folder\.$
run   eagle3 --evaluate.prompts=[{work}/overall.jsonl]         | the prompt p1 is in a slice named overall
run   medusa --evaluate.drafts=[{{"tree":"{work}/wide.json"}}] | wide proposes rank 900000 .the most likely token has 0
run   medusa --evaluate.max_new_tokens_by_slice.poetry=5       | max_new_tokens_by_slice names the slice poetry, but the
run   medusa --evaluate.example_slices=[chat,prose]            | example_slices names the slice prose, but the prompts have
train draft_model --head.init_from={work}/short                | of 128 tokens through, but the head reads at most 64: set data\.
run   hydra --head.num_layers=4                                | cannot hold this head: it has head\.num_layers above 2 without
train hydra --head.num_layers=4 --export.layout=hydra          | cannot hold this head: it has head\.num_layers above 2 without
"""
"""Commands with options, and what they are told."""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_cannot_be_is_refused_before_any_work(row: str, workplace: Path, tmp_path: Path) -> None:
    words, said = row.format(work=workplace).rsplit("|", 1)
    command, method, *own = words.split()
    with pytest.raises(UserError, match=said.strip()):
        preflight(session_of(workplace, tmp_path, method, {}, *own), command)
    assert not (tmp_path / "run").exists()


def test_what_can_be_is_not_refused(workplace: Path, tmp_path: Path) -> None:
    target = load_target(str(workplace / "target"))
    save_head(make_head("dflash", target, torch.arange(0, target.vocab_size, 2)), tmp_path / "narrow", target)
    whole = {"draft_vocab_size": target.vocab_size, "num_layers": 2, "block_size": 5}
    resized = [f"--train.warm_start={tmp_path / 'narrow'}", "--train.resize=true", "--export.layout=dflash_llama_cpp"]
    preflight(session_of(workplace, tmp_path, "dflash", whole, *resized), "train")
    preflight(session_of(workplace, tmp_path, "eagle3", {"draft_vocab_size": len(tiny_tokenizer())}), "train")
    head = {"init_from": str(workplace / "short")}
    preflight(session_of(workplace, tmp_path, "draft_model", head, "--data.max_length=64"), "train")
    assert not (tmp_path / "run").exists()


def test_a_head_that_no_engine_serves_is_trained(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Untied blocks that are still equal count, too: training makes them differ."""
    for tied in (False, True):
        preflight(session_of(workplace, tmp_path, "hydra", WIDE_HYDRA | {"tie_blocks": tied}), "train")
        said = (
            "warning: such heads can be trained and measured, but not exported: The layout" in capsys.readouterr().err
        )
        assert said != tied


WITHOUT_EFFECT = """
--answers.regenerate=false --answers.top_p=0.9                          | answers.top_p is set, but answers.regenerate is false: .*leave the key out.
--answers.regenerate=false                                              |
--features.source=online --features.shard_mb=1                          | features.shard_mb is 1, but features.source is online
--features.source=online --features.shard_mb=1 --features.verify=false  | shard_mb is 1 and features.verify is False, but features.source is online
--features.source=store --features.shard_mb=1                           |
--features.source=online --features.shard_mb=512                        |
--answers.served_name=mine                                              | answers.served_name is mine, but answers.servers names none
--train.optimizer=adamw --train.muon_lr=0.5                             | train.muon_lr is 0.5, but train.optimizer is adamw
--train.optimizer=muon --train.muon_lr=0.5                              |
"""


@pytest.mark.parametrize("row", WITHOUT_EFFECT.strip().splitlines())
def test_settings_without_effect_are_warned_of(
    row: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = row.split("|")
    preflight(session_of(workplace, tmp_path, "eagle3", {}, *words.split()), "train")
    warned = re.findall("warning: .*, but .*", capsys.readouterr().err)
    assert len(warned) == bool(said.strip())
    assert not warned or re.search(said.strip(), warned[0])


def test_processes_do_not_share_a_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.stages.session.world", lambda: World(1, 2, 1))
    with pytest.raises(UserError, match=r"target.device is 'cuda:0', but 2 processes have a GPU each: set it to cuda"):
        choose_device("cuda:0")
