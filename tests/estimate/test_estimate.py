"""`draftsmith plan`: its figures against stores, caches, models and schedules, what would make a run shorter, and what it says to mistakes."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.cli.main import main
from draftsmith.data.batch import Tokenized, lay_texts
from draftsmith.data.conversations.templates import load_tokenizer
from draftsmith.data.embedded import SHIPPED
from draftsmith.data.features.extract import extract
from draftsmith.decoder.cache import KVCache
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.slots import run_draft
from draftsmith.errors import UserError
from draftsmith.estimate import figures
from draftsmith.estimate.estimate import LEAST_SHARE, MOST_LINES, describe, shorter, stages_of, total_seconds
from draftsmith.estimate.estimator import Estimator, assume, make_estimate, read_target
from draftsmith.estimate.evaluation import EvaluationEstimate
from draftsmith.estimate.figures import DEVICES, Device, Estimate, device_here, find_device
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.registry import find_method
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.schema import AnswersSpec, DataSpec, FeaturesSpec, Recipe, TrainSpec
from draftsmith.target.shape import shape_of
from draftsmith.target.target import Target
from draftsmith.train.feed import _with_states
from draftsmith.train.schedule import Schedule
from tests.models import save_tiny_target, tiny_model

PROMPT, ANSWER, SAMPLES = 10, 14, 12


def target(kind: str = "llama", **changes: Any) -> Target:
    return Target(tiny_model(kind, **changes), path="tiny", fingerprint="0")


def estimate(of: Target, **sections: Any) -> Estimate:
    recipe = Recipe(
        **{
            "data": DataSpec(limit=SAMPLES, max_length=48, heldout=2),
            "answers": AnswersSpec(max_new_tokens=28, batch=4),
            "train": TrainSpec(row_tokens=48, rows=2, accumulation=3, epochs=4),
            "head": Eagle3Options(draft_vocab_size=80),
            **sections,
        }
    )
    shape = shape_of(of.model.config, 4)
    given = replace(assume(recipe, shape, find_device("h100")), prompt=PROMPT, answer=ANSWER)
    return make_estimate(recipe, shape, SAMPLES, given)


@pytest.mark.parametrize("stored", [None, [1, 3]])
def test_the_store_has_the_bytes_foretold(tmp_path: Path, stored: list[int] | None) -> None:
    """Besides them a shard has only its header."""
    made, layers = estimate(t := target(), features=FeaturesSpec(layer_ids=stored)), stored or [2, 4, 5]
    ids = torch.randint(3, 160, (SAMPLES, PROMPT + ANSWER))
    samples = [Tokenized(row, torch.arange(len(row)) >= PROMPT, str(i), "s") for i, row in enumerate(ids)]
    extract(t, samples, tmp_path, layer_ids=layers)
    (shard,) = tmp_path.glob("*.safetensors")
    header = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    assert shard.stat().st_size == made.store_bytes + header


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "deepseek"])
def test_parameters_and_flops_of_a_target(kind: str) -> None:
    """The lm_head included, norms not worth it; eager attention multiplies every pair of tokens, a causal one half."""
    given = tiny_model(kind)
    model = AutoModelForCausalLM.from_config(given.config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    shape = shape_of(given.config, 4)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    length = 96
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(3, 160, (1, length)))
    attention = shape.forward_flops(length) - 2 * shape.active * length
    assert counter.get_total_flops() == pytest.approx(2 * shape.active * length + 2 * attention, rel=0.01)


def test_what_experts_and_windows_save() -> None:
    mixture = shape_of(tiny_model("mixtral").config, 4)
    assert mixture.experts == 8 * 4 * 3 * 64 * 96
    assert mixture.expert_share == 0.5
    assert mixture.touched_bytes(1) == 4 * mixture.active
    assert mixture.touched_bytes(3) == 4 * (mixture.active + mixture.experts * 3 / 8)
    window = shape_of(tiny_model("mistral").config, 4)
    assert window.windows == (8,) * 8
    seen = sum(min(t, 8) for t in range(1, 101))
    attention = window.forward_flops(100) - 2 * window.active * 100
    assert attention == pytest.approx(4 * 64 * 8 * seen, rel=0.01)
    assert window.step_flops(50) - 2 * window.active == 4 * 64 * 8 * 8


def test_a_tied_embedding_counts_once() -> None:
    shape = shape_of(tiny_model("llama", tie_word_embeddings=True).config, 4)
    assert shape.lookup == 0
    assert shape.active == shape.parameters


@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek"])
def test_a_cached_token_takes_the_bytes_foretold(kind: str) -> None:
    t = target(kind)
    cache = KVCache.for_target(t, 4, 48)
    ids = torch.randint(3, 160, (4, 5))
    run_draft(t, cache, Draft.chain(ids[:, 0], ids[:, 1:]), longest=0)
    made = estimate(t)
    assert sum(b.numel() * b.element_size() for b in cache.buffers.values()) == 4 * 48 * made.target.kv_bytes
    assert made.answer_bytes == made.target.weight_bytes + 4 * 48 * made.target.kv_bytes


@pytest.mark.parametrize("gpus", [1, 2])
def test_steps_are_those_of_the_schedule(gpus: int) -> None:
    """Two texts of 24 tokens fill a row of 48 exactly."""
    made = estimate(target())
    made = replace(made, given=replace(made.given, gpus=gpus))
    lengths = [PROMPT + ANSWER] * (SAMPLES - 2)
    schedule = Schedule(lengths, made.recipe.train, 0, gpus)
    assert made.steps == sum(len(schedule.epoch(e)) // schedule.window for e in range(4))
    assert made.pass_bytes == made.text.memory(4, made.given.device.name)
    assert replace(made, recipe=replace(made.recipe, train=replace(made.recipe.train, max_steps=1))).steps == 1


def test_the_batches_at_hand_are_those_of_the_feed() -> None:
    """Two texts of 24 tokens fill a row of 48; a GPU holds two micro-batches, and a CPU the feed's ring of four."""
    t = target()
    made = estimate(t, train=TrainSpec(row_tokens=48, rows=2, accumulation=3, workers=1))
    text = torch.arange(PROMPT + ANSWER), torch.ones(PROMPT + ANSWER, dtype=torch.bool)
    bare = lay_texts([[text, text], [text, text]], 48)
    source = SimpleNamespace(hidden_size=t.hidden_size, dtype=torch.float32)
    batch = _with_states(bare, source, range(made.head.aux_layers), None)
    held = sum(x.nbytes for x in vars(batch).values() if isinstance(x, torch.Tensor))
    assert made.batch_bytes == pytest.approx(2 * held, rel=0.05)
    here = replace(made, given=replace(made.given, device=replace(made.given.device, name="cpu")))
    assert here.batch_bytes == pytest.approx(4 * held, rel=0.05)
    online = replace(made, recipe=replace(made.recipe, features=FeaturesSpec(source="online")))
    assert online.batch_bytes == pytest.approx(held, rel=0.05)
    assert made.train_bytes == made.train_target_bytes + made.head_bytes + made.pass_bytes + made.batch_bytes


@pytest.mark.slow
def test_a_document_of_32k_tokens_fits_a_gpu_of_80_gb() -> None:
    """EAGLE-3 of seven steps and 32,000 tokens for a target of Llama-3.1-8B's dimensions, with the target's weights in memory."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2**17,
    )
    recipe = Recipe(
        data=DataSpec(limit=100, max_length=2**15),
        answers=AnswersSpec(regenerate=False),
        train=TrainSpec(rows=1, row_tokens=2**15),
        head=Eagle3Options(draft_vocab_size=32000),
    )
    shape = shape_of(config, 2)
    given = replace(assume(recipe, shape, find_device("h100")), prompt=768, answer=32000)
    made = make_estimate(recipe, shape, 100, given)
    assert made.head.guessed == ""
    assert 0.8 * made.given.device.memory < made.train_bytes < made.given.device.memory


def test_times_follow_what_they_should() -> None:
    made = estimate(target())

    def given(**changes: Any) -> Estimate:
        return replace(made, given=replace(made.given, **changes))

    half = given(utilisation=made.given.utilisation / 2)
    assert half.train_seconds == pytest.approx(2 * made.train_seconds)
    assert half.answer_seconds < 1.1 * made.answer_seconds  # bound by memory
    slow = given(device=replace(made.given.device, bandwidth=made.given.device.bandwidth / 2))
    assert slow.answer_seconds > 1.9 * made.answer_seconds
    assert EvaluationEstimate(slow).parts["decoding"] > 1.9 * EvaluationEstimate(made).parts["decoding"]
    two = given(gpus=2)
    assert made.given.gpus == 1
    assert two.answer_seconds == pytest.approx(made.answer_seconds / 2)
    assert two.feature_seconds == pytest.approx(made.feature_seconds / 2)
    online = replace(made, recipe=replace(made.recipe, features=FeaturesSpec(source="online")))
    # The target passes over held-out answers too, in every evaluation.
    spec, data = made.recipe.train, made.recipe.data
    looked_at = min(spec.evaluations, made.steps) * data.heldout * (made.given.prompt + made.given.answer)
    passes = made.seconds(made.online_flops) * (1 + looked_at / made.seen_tokens)
    assert online.train_seconds == pytest.approx(made.train_seconds + passes)


def test_a_chunk_of_answers_takes_the_passes_that_its_batches_take() -> None:
    """A slow machine's batch of 4 rows: 14 passes for each batch but the last, whose longest answer takes 28."""
    made = estimate(target())  # 12 samples, answers of 14 tokens and at most 28
    passes = 2 * ANSWER + 28
    rows = SAMPLES * ANSWER / passes
    prefill = made.seconds(SAMPLES * made.target.forward_flops(PROMPT))
    assert made.answer_seconds == pytest.approx(prefill + passes * made.pass_seconds(rows, 1, PROMPT + ANSWER / 2))


def test_what_does_not_fit_in_memory_is_said() -> None:
    made = estimate(target())
    small = replace(made, given=replace(made.given, device=replace(made.given.device, memory=made.train_bytes - 1)))
    assert not [line for line in describe(made) if line.startswith("does not fit")]
    assert any(line.startswith("does not fit: training needs") for line in describe(small))


def test_the_total_is_that_of_the_stages() -> None:
    made = estimate(target())
    stages = {stage.name: stage for stage in stages_of(made)}
    assert [*stages] == ["answers", "hidden states", "training", "evaluation", "export"]
    parts = [made.answer_seconds, made.feature_seconds, made.train_seconds]
    assert total_seconds(made) == pytest.approx(sum(parts) + EvaluationEstimate(made).seconds)
    online = estimate(target(), features=FeaturesSpec(source="online"), answers=AnswersSpec(regenerate=False))
    assert [stage.name for stage in stages_of(online)] == ["training", "evaluation", "export"]


def test_the_files_have_the_bytes_foretold(tmp_path: Path) -> None:
    """The best head, and the weights and moments of two checkpoints and of the one that is being written."""
    t = target()
    made = estimate(t, train=TrainSpec(optimizer="adamw"))
    head = find_method("eagle3").build(made.recipe.head, t, torch.arange(80))
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    sum(p.sum() for p in trained).backward()
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.numel() > 1]
    held = sum(4 * p.numel() for p in trained)
    assert made.export_bytes == held
    assert made.train_file_bytes == held + 3 * (held + sum(4 * x.numel() for x in moments))


def test_a_gpu_here_is_that_of_the_table_or_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "memory_of", lambda device: 10**12)
    for name, found in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GeForce RTX 4090", "rtx4090")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert device_here("cuda:0") == DEVICES[found]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fast 1")
    monkeypatch.setattr(figures, "available_memory", lambda device: 7)
    assert device_here("cuda:0") == Device("cuda:0", 0.0, 0.0, 7.0)
    assert device_here("cuda:0").measured
    assert device_here("cpu").name == "cpu"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Options that name a target of which there is a config alone."""
    tiny_model("qwen3").config.save_pretrained(tmp_path / "target")
    return ["--target.path", str(tmp_path / "target"), "--data.limit", "1000", "--device", "h100"]


@pytest.fixture
def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `draftsmith plan` says of it, with further options."""

    def run(*more: str, base: list[str] = words) -> str:
        assert main(["plan", *base, *more]) == 0
        return capsys.readouterr().out

    return run


def test_engines_that_will_not_draft_for_the_target_are_named(told: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "target" / "config.json"
    for kind, method, count in (("Gemma3", "medusa", 0), ("Mixtral", "eagle3", 1)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [f"{kind}ForCausalLM"]}))
        found = [line for line in told("--method", method).splitlines() if line.startswith("engines: ")]
        none = f"no engine that reads the layout {method} drafts with such heads for .* class {kind}"
        assert len(found) == len([line for line in found if re.search(none, line)]) == count


def test_the_command_reads_a_config_alone(told: Callable[..., str]) -> None:
    lines = told().splitlines()
    assert lines[0] == "plan of run"
    kinds = ["target", "assumed", "answers", "hidden", "training", "memory", "evaluation", "export", "total"]
    kinds += ["guessed"] * 2 + ["shorter"] * (len(lines) - 12)
    assert [line.split(" ")[0].rstrip(":") for line in lines[1:]] == kinds
    assert "of 128 tokens, half of answers.max_new_tokens; --answer-tokens N says better" in lines[11]
    assert "1000 conversations of 64 prompt and 128 answer tokens; h100" in lines[2]
    assert 12 < len(lines) <= 17
    more = ["--device=A100", "--gpus", "4", "--utilisation", "0.3", "--prompt-tokens", "70", "--answer-tokens", "30"]
    text = told("--method", "medusa", *more)
    assert "of 70 prompt and 30 answer tokens; 4 a100, which reach 30% of 312 TFLOP/s" in text
    assert "guessed" not in text
    assert all(line.startswith("#   ") and len(line) <= 120 for line in told("--comment").splitlines())


def test_rows_of_local_files_are_counted(words: list[str], told: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    path.write_text(f"{row}\n" * 3)
    for base in ([*words[:2], *words[-2:]], words):  # data.limit is more than there is
        assert "assumed: 3 conversations" in told("--data.sources", f"[{path}]", "--data.heldout", "1", base=base)


def test_local_prompts_are_counted(told: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "slice": "aab"[i % 3], "messages": [{"role": "user", "content": "hi"}]} for i in range(9)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own, uncounted = f"[{path}]", "evaluation: 100 prompts (assumed, as they are not on this machine)"
    assert "evaluation: 9 prompts, 2 t" in told("--evaluate.prompts", own)
    assert "evaluation: 7 prompts, 2 t" in told("--evaluate.prompts", own, "--evaluate.per_slice", "4")
    assert uncounted in told("--evaluate.prompts", "[owner/name]")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--data.sources", "[talk.jsonl]"], "data.sources: There is no file or folder talk.jsonl"),
        (["--data.sources", "[./talk/*.jsonl]"], "data.sources: No file matches ./talk/*.jsonl"),
        (["--data.sources", "[embedded]"], "data.sources: embedded is the name of a target"),
        (
            ["--evaluate.prompts", "[owner/name, prompts.json]"],
            "evaluate.prompts: There is no file or folder prompts.json",
        ),
        (["--data.chat_template", "mine.jinja"], "data.chat_template is mine.jinja, but there is no such file"),
        (["--target.path", "./nowhere"], "The config of the target ./nowhere cannot be read"),
    ],
)
def test_a_local_file_that_is_missing_is_named(
    words: list[str], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, *options]) == 2
    assert said in capsys.readouterr().err


def test_answers_that_the_run_holds_are_counted(told: Callable[..., str], tmp_path: Path) -> None:
    facts = {"answers": 4, "output_tokens": 102}
    record = {"inputs": {"answers.max_new_tokens": 60}, "fingerprint": "0", "state": "done", "facts": facts}
    (tmp_path / "run").mkdir()
    for changed, tokens in (({}, 26), ({"inputs": {"answers.max_new_tokens": 80}}, 30), ({"facts": {}}, 30)):
        (tmp_path / "run" / "run.json").write_text(json.dumps({"answers": record | changed}))
        text = told("--output_dir", str(tmp_path / "run"), "--answers.max_new_tokens", "60")
        assert f"prompt and {tokens} answer tokens" in text
        assert ("guessed: answers" in text) == (tokens == 30)


def test_answers_in_the_data_are_counted(told: Callable[..., str], tmp_path: Path) -> None:
    """With answers.regenerate false the head learns from them, however long answers may be."""
    row = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one two three"}]
    (tmp_path / "talk.jsonl").write_text(f"{json.dumps({'messages': row})}\n" * 3)
    words = ["--data.sources", f"[{tmp_path}/talk.jsonl]", "--data.heldout", "1", "--device", "h100"]
    text = told("--target.path", "embedded", "--answers.regenerate", "false", base=words)
    found = re.search(r"assumed: 3 texts of (\d+) prompt and (\d+) answer tokens", text)
    assert found is not None
    tokenizer = load_tokenizer(str(SHIPPED))
    assert int(found[2]) == len(tokenizer("one two three", add_special_tokens=False)["input_ids"]) + 1
    assert int(found[1]) + int(found[2]) == len(tokenizer.apply_chat_template(row)["input_ids"])
    assert "guessed" not in text


def test_each_answer_is_a_text_where_the_template_renders_earlier_turns_otherwise(
    told: Callable[..., str], tmp_path: Path
) -> None:
    """And so are stored and learned."""
    turns = [{"role": role, "content": f"one two {i}"} for i in range(3) for role in ("user", "assistant")]
    (tmp_path / "talk.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    words = ["--data.sources", f"[{tmp_path}/talk.jsonl]", "--data.heldout", "1", "--device", "h100"]
    words += ["--target.path", "embedded", "--answers.regenerate", "false"]
    text = "{{ m.content if loop.last or m.role == 'user' else '-' }}"
    last = "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "thinks.jinja").write_text(
        f"{{% for m in messages %}}<{{{{ m.role }}}}>{text}{{{{ eos_token }}}}{{% endfor %}}{last}"
    )
    assert "assumed: 3 texts of" in told(base=words)
    words += ["--data.chat_template", str(tmp_path / "thinks.jinja")]
    assert "assumed: 9 texts of" in told(base=words)


def test_conversations_that_are_too_long_are_counted(told: Callable[..., str], tmp_path: Path) -> None:
    """Where fewer of them fit than are held out, too: which do not is known when they are read."""
    rows = [
        [{"role": "user", "content": "hi " * n}, {"role": "assistant", "content": "so"}] for n in [1] * 3 + [900] * 7
    ]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = ["--data.sources", f"[{tmp_path}/talk.jsonl]", "--data.heldout", "5", "--data.max_length", "400"]
    words += ["--target.path", "embedded", "--answers.regenerate", "false", "--device", "h100"]
    assert "assumed: 10 texts of" in told(base=words)


def make_pilot(folder: Path, method: str = "eagle3", evaluations: int = 8) -> Path:
    """Write what a training of 8000 tokens leaves of its evaluations."""
    (folder / "train").mkdir(parents=True)
    taus = [(1000 * i, 3 - i**-0.5) for i in range(1, evaluations + 1)]
    lines = [{"step": n // 100, "tokens": n, "tau": {"overall": tau, "slices": {}}} for n, tau in taus]
    (folder / "train" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "train" / "summary.json").write_text("{}")
    record = {"train": {"inputs": {"num_speculative_tokens": 5, "method": method}, "facts": {}}}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_a_pilot_foretells_tau(told: Callable[..., str], tmp_path: Path) -> None:
    """The pilot that is named, else the recipe's own run, else nothing."""

    def line(*more: str) -> list[str]:
        lines = told("--output_dir", str(tmp_path / "own"), *more).splitlines()
        return [line for line in lines if line.startswith("held-out tau")]

    assert line() == []
    pilot = make_pilot(tmp_path / "pilot")
    (said,) = line("--pilot", str(pilot))
    assert re.fullmatch(
        r"held-out tau: about 2\.\d\d \[2\.\d\d, \d\.\d\d\] at .*k tokens, forecast from the 8 evaluations .*", said
    )
    make_pilot(tmp_path / "own", evaluations=1)
    (said,) = line()
    assert "no forecast from the 1 evaluations" in said


def test_pilots_that_are_none(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pilot = make_pilot(tmp_path / "pilot", method="medusa")
    for folder, said in ((pilot, "trained medusa, and the recipe eagle3"), (tmp_path / "x", "has no evaluation")):
        assert main(["plan", *words, "--pilot", str(folder)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--device", "abacus"], "--device 'abacus' is not in the table"),
        (["--device", "cpu", "--gpus", "2"], "--gpus is 2, but this machine is measured as it is"),
        (["--device", "cpu", "--utilisation", "0.5"], "--utilisation is 0.5, but this machine is measured"),
        (["--gpus", "0"], "--gpus is '0'"),
        (["--gpus", "two"], "--gpus is 'two'"),
        (["--utilisation", "40"], "a share above 0"),
        (["--utilisation", "nan"], "a share above 0"),
        (["--prompt-tokens", "3000"], "3000 prompt and 128 answer tokens do not fit the 256"),
        (["--data.limit", "null"], "data.limit is null"),
        (["--data.limit", "10"], "data.heldout is 200 but there are only 10 conversations"),
        (["--head.layer_ids", "[2,4,99]"], ": 99 is out of range, the target has 8 layers; choose from 0 to 7"),
        (["--head.draft_vocab_size", "99999"], "head.draft_vocab_size is 99999, but the target has"),
        (["--method=dflash", "--head={mask_token_id: 8192}"], "head.mask_token_id is 8192, but the target"),
        (["--method=dflash", "--head={block_size: 1024}"], "reads no more than 256 tokens: make the block shorter"),
        (["--export.layout", "onnx"], "export.layout is 'onnx', which is unknown: choose one of eagle3, "),
        (["--method=draft_model", "--head.init_from=./nowhere"], "The config of the model ./nowhere cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(
    extra: list[str], said: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words, *extra]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert said in line


@pytest.mark.parametrize(
    "changed",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**6},
        {"head_dim": 0},
        {"vocab_size": 0},
        {"hidden_size": 10**30},
        {"pad_token_id": 10**6},
        {"hidden_act": ""},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 0}},
    ],
)
def test_a_configuration_of_no_model(changed: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path, "llama", num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(UserError) as info:
        read_target(parse_recipe(["--name", "x", "--method", "medusa", "--target.path", path]))
    assert "\n" not in str(info.value)


@pytest.fixture
def sized(words: list[str], tmp_path: Path) -> list[str]:
    rows = [{"id": str(i), "messages": [{"role": "user", "content": "hi"}]} for i in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [*words[:4], "--data.heldout", "50", "--evaluate.prompts", f"[{tmp_path / 'prompts.jsonl'}]"]


@pytest.mark.parametrize("more", [[], ["--features.source", "online", "--data.limit", "40000"]])
def test_every_line_holds(sized: list[str], more: list[str], told: Callable[..., str]) -> None:
    recipe = parse_recipe([*sized, *more])
    estimator = Estimator.of(recipe, find_device("a100"), {})
    made = estimator.estimate(recipe)
    whole, lines = total_seconds(made), shorter(made, estimator.estimate)
    assert 1 < len(lines) <= MOST_LINES
    shares = []
    for line in lines:
        share, key, old, new = re.fullmatch(r"shorter by .+ \((\d+)%\): ([\w.]+) (.+) -> (.+)", line).groups()
        section, name = key.split(".")
        assert json.dumps(getattr(getattr(recipe, section), name)) == old
        other = parse_recipe([*sized, *more, f"--{key}", json.loads(new) if new.startswith('"') else new])
        saved = 1 - total_seconds(estimator.estimate(other)) / whole
        assert round(100 * saved) == int(share)
        shares.append(saved)
    assert shares == sorted(shares, reverse=True)
    assert min(shares) >= LEAST_SHARE
    assert told(*more, "--device", "a100", base=sized).splitlines()[-len(lines) :] == lines


def test_what_the_user_said_of_texts_stays(sized: list[str]) -> None:
    recipe = parse_recipe(sized)
    estimator = Estimator.of(recipe, find_device("a100"), {"prompt": 70, "answer": 100})
    assert (estimator.estimate(recipe).given.prompt, estimator.estimate(recipe).given.answer) == (70, 100)
    fewer = parse_recipe([*sized, "--answers.max_new_tokens", "40"])
    assert estimator.estimate(fewer).given.answer == 40, "no answer is longer than it may be"


@pytest.mark.parametrize("asked", [{}, {"prompt": 70, "answer": 100}])
def test_answers_of_the_evaluation_have_a_limit_of_their_own(sized: list[str], asked: dict[str, int]) -> None:
    """So that a lower answers.max_new_tokens saves nothing there, and its own does."""
    recipe = parse_recipe([*sized, "--evaluate.max_new_tokens", "160"])
    estimator = Estimator.of(recipe, find_device("a100"), asked)

    def seconds(*more: str) -> float:
        changed = parse_recipe([*sized, "--evaluate.max_new_tokens", "160", *more])
        return EvaluationEstimate(estimator.estimate(changed)).seconds

    assert estimator.estimate(recipe).given.evaluated == asked.get("answer", 80)
    assert seconds("--answers.max_new_tokens", "40") == seconds() == seconds("--answers.max_new_tokens", "400")
    assert seconds("--evaluate.max_new_tokens", "80") < 0.9 * seconds()


def test_shorter_answers_to_learn_from_are_not_credited_with_the_evaluation(sized: list[str]) -> None:
    """Answers of 100 tokens, of which 80 may be learned from where the advice is taken."""
    recipe = parse_recipe([*sized, "--answers.max_new_tokens", "160"])
    estimator = Estimator.of(recipe, find_device("a100"), {"prompt": 70, "answer": 100})
    half = replace(recipe, answers=replace(recipe.answers, max_new_tokens=80))
    before, after = ({s.name: s.seconds for s in stages_of(estimator.estimate(one))} for one in (recipe, half))
    assert after["answers"] < before["answers"]
    assert after["evaluation"] == before["evaluation"]


def test_a_part_of_a_gpu_is_measured_and_a_smaller_one_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "memory_of", lambda device: 40e9)
    monkeypatch.setattr(figures, "available_memory", lambda device: 7)
    for name, found in (
        ("NVIDIA A100-SXM4-40GB", replace(DEVICES["a100"], memory=40e9)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", Device("cuda:0", 0.0, 0.0, 7.0)),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", Device("cuda:0", 0.0, 0.0, 7.0)),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert device_here("cuda:0") == found
