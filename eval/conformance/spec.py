"""Set up a check: a tiny target, its answers, and a head that is trained on them for a few steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.batch import Tokenized, TrainBatch, collate
from draftsmith.data.features.extract import compute_features
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.sampling import Sampling, row_key
from draftsmith.eval.simulate.texts import to_sample
from draftsmith.heads.base import DraftHead
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import find_method
from draftsmith.target.target import Target

_NEW_TOKENS = 20


def tiny_target(seed: int = 0, **changes: Any) -> Target:
    """Return a Llama of three layers and width 32 with random weights, in float32. changes: keys of its config."""
    config = LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": 0.12,
            **changes,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones would hide a norm that is left out
                torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
    return Target(model, path="tiny", fingerprint="tiny")


@dataclass(frozen=True, eq=False)
class Spec:
    """A drafter to check.

    method: its name in the registry. options: its options. target: a small one in float32. draft_vocab: [W] sorted
    target ids, None for all. num_speculative_tokens: at least 2 where the head can. loss: that it is trained with.
    learning_rate, steps: of the short training which makes drafts that are accepted.
    """

    method: str
    options: Any
    target: Target
    draft_vocab: Tensor | None = None
    num_speculative_tokens: int = 3
    loss: LossSpec = field(default_factory=LossSpec)
    learning_rate: float = 3e-3
    steps: int = 30

    @property
    def length(self) -> int:
        """K: tokens of a draft, no more than the head can draft."""
        return self.head.clamp_draft_length(self.num_speculative_tokens)

    @cached_property
    def requests(self) -> list[Request]:
        """Random prompts of different lengths, no two of them equal."""
        generator = torch.Generator().manual_seed(0)
        few = self.target.vocab_size - 3
        prompts = [(3 + torch.randint(few, (2 + i % 9,), generator=generator)).tolist() for i in range(32)]
        return [Request.seeded(f"p{i}", "ab"[i % 2], ids, _NEW_TOKENS - i % 7, 0) for i, ids in enumerate(prompts)]

    @cached_property
    def samples(self) -> list[Tokenized]:
        """The target's answers to the prompts, half of them sampled."""
        half = len(self.requests) // 2
        halves = ((self.requests[:half], Sampling()), (self.requests[half:], Sampling(1.0)))
        answers = [decode_batch(self.target, TargetAlone(), *one).generations for one in halves]
        return [to_sample(generation) for pair in zip(*answers, strict=True) for generation in pair]

    @cached_property
    def head(self) -> DraftHead:
        """A head after a short training, so that some of its drafts are accepted and no tensor has its initial
        value."""
        return train_briefly(self, self.steps).eval()

    @cached_property
    def deployed(self) -> DraftHead:
        """The head as it drafts once trained."""
        return self.head.deployed(self.target).eval()

    @property
    def verifier(self) -> Target:
        """The target that verifies the drafts."""
        return self.deployed.verifier(self.target)

    def drafter(self) -> Drafter:
        """Return a new drafter of chains with the head."""
        return find_method(self.method).make_drafter(self.deployed, self.length)


def train_briefly(spec: Spec, steps: int) -> DraftHead:
    """Return a new head after so many steps of AdamW on the target's answers, from a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = find_method(spec.method).build(spec.options, spec.target, spec.draft_vocab).train()
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.requires_grad:
                    # Weights that start at zero would hide errors in the layers before them.
                    parameter.add_((0.02 if parameter.any() else 0.1) * torch.randn_like(parameter))
        batch = pack(spec, [spec.samples[i : i + 2] for i in range(0, len(spec.samples), 2)], head)
        optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=spec.learning_rate)
        for _ in range(steps):
            scored = head_loss(head(batch, head.trains.steps), batch, spec.target.head, head.draft_vocab, spec.loss)
            optimizer.zero_grad()
            (scored.loss_sum / loss_divisor(batch, spec.loss, head)).backward()
            optimizer.step()
    return head


def pack(spec: Spec, rows: Sequence[Sequence[Tokenized]], head: DraftHead | None = None) -> TrainBatch:
    """Compute the features of documents that a head reads (that of `spec` if none is given) and pack them into rows, each as
    long as the longest."""
    layer_ids = (head or spec.head).reads.layer_ids
    samples = [sample for row in rows for sample in row]
    features = iter(compute_features(spec.target, samples, layer_ids, spec.target.dtype))
    documents = [[next(features) for _ in row] for row in rows]
    longest = max(sum(len(d.ids) for d in row) for row in documents)
    seeds = [[row_key(0, sample.sample_id) for sample in row] for row in rows]
    return collate(documents, longest, seeds=seeds).to(spec.target.device)
