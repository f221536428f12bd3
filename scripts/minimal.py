"""EAGLE-3 on one page, in plain PyTorch: train a draft head for a small model, then decode with it.

    python scripts/minimal.py            # for the target that comes with draftsmith: a minute on two CPU cores
    python scripts/minimal.py my/llama   # for another Llama, in a folder or on the Hub

Read this first. The target answers prompts, and the head learns from its hidden states to guess its next K distributions. Decoding
drafts K tokens, lets the target check them in one pass, and keeps those that it would have written itself. Loss and text are those
of draftsmith (tests/test_minimal.py), which adds what is fast and general: packing, caches, sampling, trees, other targets, engines.

Shapes: L tokens of a text, H hidden size, A layers that are read, V vocabulary, N query heads, G key/value heads, D size of a head.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

TARGET = Path(__file__).resolve().parents[1] / "data" / "embedded" / "target"
QUESTION = "Say Ann has {} bags of {} pears and Tom brings 4 more. How many in all?"
K, DECAY = 4, 0.8
"""Tokens of a draft, which are steps of training; step k weighs DECAY**k in the loss."""


def layers_to_read(model: PreTrainedModel) -> list[int]:
    """Return three layers: an early, a middle and a late one. Layer k stands for the states that enter it."""
    return [2, model.config.num_hidden_layers // 2, model.config.num_hidden_layers - 3]


@dataclass
class Text:
    """A prompt and its answer [L], where that begins, and what the target computes: the states [L, A*H] that enter the layers that
    are read, and the log-probabilities [L, V] of the token after each."""

    ids: Tensor
    start: int
    aux: Tensor
    log_p: Tensor


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, start: int) -> Text:
    out = model(ids[None], output_hidden_states=True)
    aux = torch.cat([out.hidden_states[i][0] for i in layers_to_read(model)], -1)
    return Text(ids, start, aux, out.logits[0].log_softmax(-1))


class Layer(nn.Module):
    """A Llama layer whose attention reads the token's embedding beside the hidden state."""

    def __init__(self, config) -> None:
        super().__init__()
        H, D, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        inner, few = config.num_attention_heads * D, config.num_key_value_heads * D
        widths = {"q_proj": (2 * H, inner), "k_proj": (2 * H, few), "v_proj": (2 * H, few), "o_proj": (inner, H)}
        self.self_attn = nn.ModuleDict({name: nn.Linear(*width, bias=False) for name, width in widths.items()})
        self.mlp = LlamaMLP(config)
        self.theta, self.head_dim = config.rope_parameters["rope_theta"], D
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(H, eps), nn.RMSNorm(H, eps)
        self.post_attention_layernorm = nn.RMSNorm(H, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, position: Tensor, keys: list, values: list) -> Tensor:
        """Return the output [L, H] of step k, and append the step's keys and values [L, G, D] to those of steps 0..k-1."""
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        q, k, v = (self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        keys.append(rotate(k, position, self.theta))
        values.append(v)
        hidden = hidden + self.self_attn["o_proj"](attend(rotate(q, position, self.theta), keys, values).flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotary embedding: turn the halves of [L, heads, D] by angles that grow with the position [L]."""
    frequency = theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = (position[:, None] * frequency).repeat(1, 2)[:, None]
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return [L, N, D]: row t sees the keys of step 0 of the rows up to t, and its own of the later steps, nobody else's."""
    L, N, D = q.shape
    keys, values = ([x.repeat_interleave(N // x.shape[1], 1) for x in many] for many in (keys, values))
    context = torch.einsum("lnd,mnd->nlm", q, keys[0]) + torch.full((L, L), -torch.inf).triu(1)
    own = [torch.einsum("lnd,lnd->nl", q, k)[..., None] for k in keys[1:]]
    weights = (torch.cat([context, *own], -1) * D**-0.5).softmax(-1)
    out = torch.einsum("nlm,mnd->lnd", weights[..., :L], values[0])
    for step, v in enumerate(values[1:]):
        out = out + weights[..., L + step].T[..., None] * v
    return out


class Head(nn.Module):
    """The EAGLE-3 head of a target. Its tensors have the names that draftsmith gives them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config, H = model.config, model.config.hidden_size
        self.embed_tokens = nn.Embedding.from_pretrained(model.get_input_embeddings().weight.detach(), freeze=True)
        self.fc = nn.Linear(len(layers_to_read(model)) * H, H, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        # Norm and output projection start as the target's, so that the head speaks its language from the beginning.
        self.norm, self.lm_head = nn.RMSNorm(H, config.rms_norm_eps), nn.Linear(H, config.vocab_size, bias=False)
        self.norm.load_state_dict(model.base_model.norm.state_dict())
        self.lm_head.load_state_dict(model.get_output_embeddings().state_dict())

    def forward(self, aux: Tensor, tokens: Tensor, follow: Callable[[int, Tensor], Tensor]) -> Iterator[Tensor]:
        """Yield the logits [L, V] of step 0, 1, ...: at step k row t guesses token t + 2 + k.

        aux: [L, A*H] the target's states, which step 0 reads; later steps read the head's own output, as in decoding ("training-time
        test"). tokens: [L] the token after each row. follow(k, logits of step k - 1): the token [L] that each row sees at step k.
        """
        hidden, position = self.fc(aux), torch.arange(len(aux))
        keys, values = [], []
        for k in count():
            hidden = self.layers[0](self.embed_tokens(tokens), hidden, position + k, keys, values)
            yield (logits := self.lm_head(self.norm(hidden)))
            tokens = follow(k + 1, logits)


def loss(head: Head, text: Text) -> Tensor:
    """Return the loss of a text, summed over its rows: KL(target || draft) of every step, later ones weighing less."""
    total, steps = torch.zeros(()), head(text.aux, text.ids.roll(-1), lambda k, _: text.ids.roll(-1 - k))
    for k, logits in zip(range(K), steps, strict=False):
        # An answer's first token comes with the prompt and is never drafted; the last row that counts guesses the last token.
        rows = slice(text.start - 1, max(text.start - 1, len(text.ids) - 2 - k))
        log_q, log_p = logits[rows].log_softmax(-1), text.log_p[1 + k :][rows]
        total = total + DECAY**k * F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    return total


def train(head: Head, texts: Sequence[Text], epochs: int, batch: int, lr: float) -> list[float]:
    """Train the head; return the loss per row of step 0 at every update, each of which takes `batch` texts."""
    optimizer, losses = torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0), []
    for _ in range(epochs):
        shuffled = random.sample(texts, len(texts))
        for some in (shuffled[i : i + batch] for i in range(0, len(texts), batch)):
            rows = sum(len(text.ids) - 1 - text.start for text in some)
            mean = torch.stack([loss(head, text) for text in some]).sum() / rows
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
            losses.append(mean.item())
    return losses


@torch.no_grad()
def decode(model: PreTrainedModel, head: Head | None, prompt: Tensor, most: int) -> tuple[list[int], list[int]]:
    """Return the greedy answer of up to `most` tokens, and how many drafts each pass after the prompt's accepted. Without a head
    the target writes alone; the answer is the same."""
    cache, answer, accepted, draft, aux = DynamicCache(config=model.config), [], [], [], []
    ends = {*torch.tensor(model.generation_config.eos_token_id).view(-1).tolist()}
    while len(answer) < most and not set(answer) & ends:
        new = torch.tensor([*(answer[-1:] or prompt.tolist()), *draft])
        out = model(new[None], past_key_values=cache, output_hidden_states=True)
        choices = out.logits[0].argmax(-1).tolist()[len(new) - 1 - len(draft) :]
        right = next((i for i, token in enumerate(draft) if token != choices[i]), len(draft))
        answer += choices[: right + 1]  # accepted drafts are the target's own choices, and one more comes for free
        accepted.append(right)
        if (kept := len(new) - len(draft) + right) < len(new):
            cache.crop(kept - len(new))
        aux.append(torch.cat([out.hidden_states[i][0, :kept] for i in layers_to_read(model)], -1))
        draft, wanted = [], min(K, most - len(answer))
        if head is not None and wanted > 0:
            following = torch.cat([prompt[1:], torch.tensor(answer)])
            steps = head(torch.cat(aux), following, lambda _, logits: logits.argmax(-1))
            draft = [int(logits[-1].argmax()) for _, logits in zip(range(wanted), steps, strict=False)]
    end = next((i + 1 for i, token in enumerate(answer) if token in ends), most)
    return answer[: min(end, most)], accepted[1:]


def main(path: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = []
    for number in random.sample(range(64), 40):
        asked = [{"role": "user", "content": QUESTION.format(2 + number // 8, 2 + number % 8)}]
        prompts.append(torch.tensor(tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]))
    answers = [decode(model, None, ids, 64)[0] for ids in prompts]
    texts = [read(model, torch.cat([p, torch.tensor(a)]), len(p)) for p, a in zip(prompts, answers, strict=True)]
    losses = train(head := Head(model), texts[4:], epochs=10, batch=4, lr=4e-3)
    print(f"loss: {losses[0]:.3f} at the first update, {losses[-1]:.3f} at the last")
    drafted = [decode(model, head, ids, 64) for ids in prompts[:4]]
    assert [answer for answer, _ in drafted] == answers[:4], "drafts must not change the text"
    accepted = [count for _, counts in drafted for count in counts]
    print(tokenizer.decode([*prompts[0].tolist(), *answers[0]]))
    print(f"tokens per pass of the target, on questions that were kept out: {1 + sum(accepted) / len(accepted):.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(TARGET))
