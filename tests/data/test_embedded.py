import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.data import embedded, embedded_training
from draftsmith.data.corpus import generate_conversations
from draftsmith.data.embedded import EmbeddedDefault, EmbeddedSettings, ensure_embedded
from draftsmith.data.embedded_training import Document, build_model, pack, packed_loss
from draftsmith.errors import UserError

MINI = EmbeddedSettings(
    conversations=300,
    prompts_per_slice=4,
    vocab_size=400,
    layers=8,
    hidden=32,
    ffn=64,
    heads=2,
    kv_heads=1,
    rows=4,
    row_tokens=128,
    steps=30,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedDefault:
    return ensure_embedded(tmp_path_factory.mktemp("cache"), progress=False, settings=MINI)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    conversations = generate_conversations(60, seed=0)
    tokenizer = embedded.train_tokenizer((m["content"] for c in conversations for m in c.messages), 300)
    return [embedded.render_document(tokenizer, c) for c in conversations]


def settings_of(documents: list[Document]) -> embedded_training.TrainingSettings:
    tokenizer = embedded.train_tokenizer(["a"], 300)
    settings = embedded._training_settings(MINI, tokenizer)
    return replace(settings, vocab_size=300, row_tokens=max(len(d.ids) for d in documents) + 40)


def test_the_target_is_a_plain_transformers_folder(made: EmbeddedDefault) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    model = AutoModelForCausalLM.from_pretrained(made.target)
    assert tokenizer.convert_tokens_to_ids(embedded.SPECIAL_TOKENS) == [0, 1, 2]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert (made.target / "chat_template.jinja").is_file()
    assert (made.target / "model.safetensors").is_file()
    assert model.config.num_hidden_layers == 8
    assert model.config.vocab_size == len(tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prompt = [{"role": "user", "content": "Hi é"}]
    rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(rendered, add_special_tokens=False)) == rendered


def test_the_target_has_learned(made: EmbeddedDefault) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    model = AutoModelForCausalLM.from_pretrained(made.target)
    losses = []
    for conversation in generate_conversations(20, seed=5):
        document = embedded.render_document(tokenizer, conversation)
        ids = torch.tensor([document.ids])
        with torch.no_grad():
            losses.append(model(ids, labels=ids).loss.item())
    assert sum(losses) / len(losses) < 0.93 * torch.tensor(float(len(tokenizer))).log().item()


def test_the_files_hold_the_corpus_and_held_out_prompts(made: EmbeddedDefault) -> None:
    conversations = [json.loads(line) for line in made.conversations.read_text().splitlines()]
    prompts = [json.loads(line) for line in made.prompts.read_text().splitlines()]
    assert len(conversations) == 300
    assert len(prompts) == 4 * 5
    assert [m["role"] for m in conversations[0]["messages"]] == ["user", "assistant"]
    assert {m["role"] for p in prompts for m in p["messages"]} == {"user"}
    asked = {c["messages"][0]["content"] for c in conversations}
    assert asked.isdisjoint(p["messages"][0]["content"] for p in prompts)


def test_a_second_call_reuses_and_says_so(
    made: EmbeddedDefault, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "train_target", None)
    cache = made.target.parent.parent
    assert ensure_embedded(cache, settings=MINI) == made
    assert "Reusing" in capsys.readouterr().out
    assert [path.name for path in cache.iterdir()] == [made.target.parent.name], "nothing temporary is left"


def test_the_cache_follows_the_environment_and_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    assert embedded.default_cache() == tmp_path
    monkeypatch.delenv("DRAFTSMITH_CACHE")
    assert embedded.default_cache() == Path.home() / ".cache" / "draftsmith"
    assert embedded._key(MINI) != embedded._key(replace(MINI, steps=31))


def test_a_cache_that_is_no_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="DRAFTSMITH_CACHE"):
        ensure_embedded(tmp_path / "file", progress=False, settings=MINI)


def test_an_interrupted_training_resumes_to_the_same_weights(
    made: EmbeddedDefault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_step, calls = embedded_training._step, 0

    def stops_after_12(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise KeyboardInterrupt
        return real_step(*args)

    monkeypatch.setattr(embedded_training, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(embedded_training, "_step", stops_after_12)
    with pytest.raises(KeyboardInterrupt):
        ensure_embedded(tmp_path, progress=False, settings=MINI)
    assert not list(tmp_path.glob("embedded-*"))

    calls = -(30 - 12) + 12  # exactly the steps that are left
    resumed = ensure_embedded(tmp_path, progress=False, settings=MINI)
    for name in ("target/model.safetensors", "target/tokenizer.json", "conversations.jsonl", "prompts.jsonl"):
        assert (resumed.target.parent / name).read_bytes() == (made.target.parent / name).read_bytes(), name


def test_rows_hold_every_document_whole_once_per_epoch(documents: list[Document]) -> None:
    settings = replace(settings_of(documents), rows=1)
    found: list[list[int]] = []
    batches = pack(documents, settings, Random(0))
    while len(found) < 3 * len(documents):
        rows = next(batches)
        starts = ((rows.position[0] == 0) & (rows.weight.roll(-1)[0] > 0)).nonzero()[:, 0].tolist()
        for start in starts:
            end = start + 1
            while end < settings.row_tokens and rows.weight[0, end] > 0:
                end += 1
            found.append(rows.ids[0, start:end].tolist())
    assert all(ids in found for ids in (d.ids for d in documents))
    assert all(ids in [d.ids for d in documents] for ids in found)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_loss_is_the_loss_of_the_documents_alone(documents: list[Document], attention: str) -> None:
    settings = replace(settings_of(documents), rows=3, prompt_weight=0.25)
    model = build_model(settings)
    model.set_attn_implementation(attention)
    rows = next(pack(documents[:12], settings, Random(0)))
    in_rows = [d for d in documents[:12] if any(contains(row, d.ids) for row in rows.ids.tolist())]
    assert len(in_rows) >= 4
    total, weights = 0.0, 0.0
    with torch.no_grad():
        for document in in_rows:
            logits = model(torch.tensor([document.ids])).logits[0, :-1]
            losses = F.cross_entropy(logits, torch.tensor(document.ids[1:]), reduction="none")
            weight = torch.full_like(losses, 0.25)
            weight[document.prompt_tokens - 1 :] = 1.0
            total += (losses * weight).sum().item()
            weights += weight.sum().item()
        packed = packed_loss(model, rows).item()
    assert packed == pytest.approx(total / weights, rel=1e-5)


def contains(row: list[int], ids: list[int]) -> bool:
    return any(row[i : i + len(ids)] == ids for i in range(len(row) - len(ids) + 1))
