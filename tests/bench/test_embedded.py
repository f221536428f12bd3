from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from draftsmith.data.batch import Tokenized, lay_texts
from draftsmith.data.conversations.load import Conversation, load_conversations
from draftsmith.data.conversations.masks import tokenize_all
from draftsmith.data.embedded import ensure_embedded
from scripts.bench import embedded
from scripts.bench.embedded import EmbeddedSettings, build_model, grow, make_target, packed_loss

pytestmark = pytest.mark.slow

MINI = EmbeddedSettings(
    conversations=300,
    vocab_size=400,
    layers=8,
    hidden=32,
    ffn=64,
    heads=2,
    kv_heads=1,
    rows=4,
    row_tokens=160,
    shallow_layers=3,
    shallow_steps=10,
    steps=20,
    adamw_lr=0.02,
)


def embedded_conversations(count: int) -> list[Conversation]:
    return load_conversations([str(ensure_embedded().conversations)], limit=count)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "target"
    make_target(folder, MINI, dtype=torch.float32, progress=False)
    return folder


@pytest.fixture(scope="module")
def samples() -> list[Tokenized]:
    conversations = embedded_conversations(40)
    tokenizer = embedded.train_tokenizer((m["content"] for c in conversations for m in c.messages), 300)
    return tokenize_all(tokenizer, conversations).samples


@pytest.fixture(scope="module")
def settings(samples: list[Tokenized]) -> EmbeddedSettings:
    return replace(MINI, vocab_size=300, row_tokens=max(len(s.ids) for s in samples) + 80)


def test_the_target_is_a_plain_transformers_folder(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(made)
    assert tokenizer.convert_tokens_to_ids(embedded.SPECIAL_TOKENS) == [0, 1, 2]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert (made / "chat_template.jinja").is_file()
    assert (made / "model.safetensors").is_file()
    assert model.config.num_hidden_layers == 8
    assert model.config.vocab_size == len(tokenizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prompt = [{"role": "user", "content": "Hi é"}]
    rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(rendered, add_special_tokens=False)) == rendered


def test_the_target_has_learned(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    model = AutoModelForCausalLM.from_pretrained(made)
    held_out = tokenize_all(tokenizer, embedded_conversations(320)[300:]).samples
    with torch.no_grad():
        losses = [model(s.ids[None], labels=s.ids.where(s.mask, -100)[None]).loss for s in held_out]
    uniform = torch.tensor(float(len(tokenizer))).log()
    assert torch.stack(losses).mean() < 0.85 * uniform


def test_the_same_settings_give_the_same_target_in_place_of_an_earlier_one(made: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "stale.json").touch()
    make_target(tmp_path / "target", MINI, dtype=torch.float32, progress=False)
    assert {path.name for path in (tmp_path / "target").iterdir()} == {path.name for path in made.iterdir()}
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "target" / name).read_bytes() == (made / name).read_bytes(), name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_loss_is_the_loss_of_the_documents_alone(
    samples: list[Tokenized], settings: EmbeddedSettings, attention: str
) -> None:
    model = randomized(build_model(settings, layers=3))
    model.set_attn_implementation(attention)
    rows = lay_texts([[(s.ids, s.mask) for s in row] for row in (samples[:3], samples[3:4], samples[4:6])], 400)
    losses = []
    with torch.no_grad():
        for sample in samples[:6]:
            logits = model(sample.ids[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, sample.ids[1:], reduction="none")[sample.mask[1:]])
        packed = packed_loss(model, rows).item()
    assert packed == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_a_grown_model_computes_what_the_shallow_one_did(samples: list[Tokenized], settings: EmbeddedSettings) -> None:
    shallow = randomized(build_model(settings, layers=3))
    deep = grow(shallow, settings)
    assert deep.config.num_hidden_layers == settings.layers == 8
    with torch.no_grad():
        expected, actual = shallow(samples[0].ids[None]).logits, deep(samples[0].ids[None]).logits
    torch.testing.assert_close(actual, expected)
    changed = [i for i, layer in enumerate(deep.model.layers) if layer.mlp.down_proj.weight.any()]
    assert changed == [0, 2, 5]


def randomized(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Layers start as the identity; a test of attention needs others."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model
