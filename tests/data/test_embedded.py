"""The embedded default: a target and texts that are shipped, the texts unpacked once."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.data import embedded
from draftsmith.data.conversations.load import load_conversations
from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.embedded import EmbeddedDefault, ensure_embedded
from draftsmith.errors import UserError

pytestmark = pytest.mark.full

UNSEEN = Path(__file__).parents[1] / "fixtures" / "embedded_unseen.jsonl"
"""Conversations made like those that the target learned from, of another seed."""
TRAINED_ON = "7300864c83f2be9993891494007cc8f1515b8678b494c3244f55ba80daf61f72"
"""SHA-256 of the conversations that the shipped target has learned."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedDefault:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        return ensure_embedded()


def test_the_shipped_target_has_learned(made: EmbeddedDefault) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made.target)
    model = AutoModelForCausalLM.from_pretrained(made.target, dtype=torch.float32)
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (16, len(tokenizer))
    assert tokenizer.eos_token_id == model.config.eos_token_id == 2
    held_out = tokenize_all(tokenizer, load_conversations([str(UNSEEN)])).samples
    with torch.no_grad():
        losses = [model(s.ids[None], labels=s.ids.where(s.mask, -100)[None]).loss for s in held_out]
    uniform = torch.tensor(float(len(tokenizer))).log()
    assert torch.stack(losses).mean() < 0.2 * uniform


def test_the_files_hold_the_corpus_and_held_out_prompts(made: EmbeddedDefault) -> None:
    conversations = [json.loads(line) for line in made.conversations.read_text().splitlines()]
    prompts = [json.loads(line) for line in made.prompts.read_text().splitlines()]
    assert hashlib.sha256(made.conversations.read_bytes()).hexdigest() == TRAINED_ON
    assert len(conversations) == 24_000
    assert len(prompts) == 24 * 5
    assert [m["role"] for m in conversations[0]["messages"]] == ["user", "assistant"]
    assert {m["role"] for p in prompts for m in p["messages"]} == {"user"}
    asked = {c["messages"][0]["content"] for c in conversations}
    assert asked.isdisjoint(p["messages"][0]["content"] for p in prompts)


def test_a_second_call_reuses(made: EmbeddedDefault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_write_texts", None)
    cache = made.prompts.parent.parent
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(cache))
    assert ensure_embedded() == made
    assert {path.name for path in cache.iterdir()} == {".lock", made.prompts.parent.name}, "nothing temporary is left"


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    assert embedded.default_cache() == tmp_path
    monkeypatch.delenv("DRAFTSMITH_CACHE")
    assert embedded.default_cache() == Path.home() / ".cache" / "draftsmith"


def test_a_cache_that_is_no_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="DRAFTSMITH_CACHE"):
        ensure_embedded()
