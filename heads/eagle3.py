"""EAGLE-3: one Llama layer that reads the target's aux streams and, in training, its own outputs (TTT).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(2025), sections 3.1-3.2; the switches of EAGLE-3.1 follow vLLM's `llama_eagle3.py`.

Shapes: B batch rows, n tokens, H hidden (draft and target alike), A aux layers, V target vocab, W draft vocab.

Rows and steps are those of heads/eagle_base.py; the hidden state of step 0 is the fused aux streams of position t.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.heads.eagle3_layer import Eagle3Layer
from draftsmith.heads.eagle3_options import Eagle3Options
from draftsmith.heads.eagle_base import EagleHead
from draftsmith.heads.eagle_layer import RMSNorm, Rotary
from draftsmith.heads.layer_config import derive_layer_config, describe_layer_config
from draftsmith.heads.low_rank import LowRankLinear
from draftsmith.heads.target import Target

__all__ = ["Eagle3Head", "Eagle3Options", "build", "load"]


class Eagle3Head(EagleHead):
    """The EAGLE-3 drafter. Parameters carry the names of the flat EAGLE-3 layout (see contracts.py).

    embedding: [V, H] the target's raw input embedding, shared and frozen unless it is to be trained. draft_vocab: [W] sorted target ids, or
    None for all of them. Weights start in fp32 at torch's defaults; `build` fills lm_head.
    """

    method: ClassVar[str] = "eagle3"

    def __init__(
        self,
        options: Eagle3Options,
        config: LlamaConfig,
        layer_ids: Sequence[int],
        embedding: Tensor,
        draft_vocab: Tensor | None,
    ) -> None:
        super().__init__()
        H, A, eps = config.hidden_size, len(layer_ids), config.rms_norm_eps
        assert embedding.shape == (config.vocab_size, H)
        self.options, self.config, self.layer_ids = options, config, tuple(layer_ids)
        self.train_steps = options.ttt_steps
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        # Embeddings to train are a copy: the target must not learn with the head.
        own = options.train_embeddings
        embedding = embedding.detach().to(torch.float32, copy=True) if own else embedding.detach()
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=not own)
        self.input_norm = RMSNorm(A * H, eps=eps) if options.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(H, eps=eps) for _ in layer_ids) if options.fc_norm else None
        self.fc = nn.Linear(A * H, H, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config, options.norm_before_residual)])
        self.norm = RMSNorm(H, eps=eps)
        W, rank = config.vocab_size if draft_vocab is None else len(draft_vocab), options.lm_head_rank
        self.lm_head = nn.Linear(H, W, bias=False) if rank is None else LowRankLinear(H, W, rank)
        self.lm_head.requires_grad_(options.train_lm_head)
        self.rotary_emb = Rotary(config)
        self.register_buffer("draft_vocab", draft_vocab)

    def first_hidden(self, aux: Tensor, last: Tensor) -> Tensor:
        """The fused aux streams; the last states are not read."""
        return self.fuse(aux)

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux streams [B, n, A*H] -> the hidden state of step 0, [B, n, H]."""
        aux = aux.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            aux = torch.cat(
                [norm(x) for norm, x in zip(self.fc_norm, aux.chunk(len(self.fc_norm), -1), strict=True)], -1
            )
        return self.fc(aux)

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., H] -> the attention's input [..., 2H] and the residual [..., H]."""
        layer = self._layer
        assert isinstance(layer, Eagle3Layer)
        return layer.enter(embedded, hidden)

    def logits(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> draft logits [..., W]."""
        return self.lm_head(self.norm(out))

    def feedback(self, out: Tensor) -> Tensor:
        """The layer's output [..., H] -> the hidden state of the next step, [..., H]."""
        return self.norm(out) if self.options.norm_output else out

    def served(self) -> "Eagle3Head":
        """The head with its output projection multiplied out, where that is of low rank."""
        if not isinstance(self.lm_head, LowRankLinear):
            return self
        options, embedding = replace(self.options, lm_head_rank=None), self.embed_tokens.weight
        tensors = {name: value for name, value in self.state_dict().items() if not name.startswith("lm_head.")}
        with torch.device(embedding.device):
            whole = Eagle3Head(options, self.config, self.layer_ids, embedding, self.draft_vocab)
        whole.load_state_dict({**tensors, "lm_head.weight": self.lm_head.product()}, assign=True)
        return whole

    def describe(self) -> dict[str, Any]:
        """Return what `load` needs besides the tensors, as JSON."""
        return {"options": asdict(self.options), "layer_config": describe_layer_config(self.config)}


def build(options: Eagle3Options, target: Target, draft_vocab: Tensor | None) -> Eagle3Head:
    """Return an untrained fp32 head for `target`, its lm_head the target's rows of the draft vocabulary, or what of low rank
    comes closest to them.

    draft_vocab: [W] sorted unique target ids, or None for all. Raises UserError for layer ids that the target
    does not have and for dimensions that do not fit together.
    """
    layer_ids = target.default_layer_ids() if options.layer_ids is None else tuple(options.layer_ids)
    target.check_layer_ids(layer_ids)
    vocab = None if draft_vocab is None else draft_vocab.to(target.device, torch.int64)
    assert vocab is None or bool((vocab.diff() > 0).all()), "the draft vocabulary is sorted and unique"
    W, rank = target.vocab_size if vocab is None else len(vocab), options.lm_head_rank
    if rank is not None and rank >= min(W, target.hidden_size):
        raise UserError(
            f"head.lm_head_rank is {rank}, but the output projection is {W} by {target.hidden_size}: give less than both, or "
            "null for a full matrix."
        )
    with torch.device(target.device):
        head = Eagle3Head(options, derive_layer_config(options, target), layer_ids, target.embedding, vocab)
    weight = target.head.weight if vocab is None else target.head.weight[vocab]
    if isinstance(head.lm_head, LowRankLinear):
        head.lm_head.approximate(weight)
        return head
    with torch.no_grad():
        head.lm_head.weight.copy_(weight)
    return head


def load(spec: dict[str, Any], target: Target, draft_vocab: Tensor | None) -> Eagle3Head:
    """Return the head that `Eagle3Head.describe` and its layer_ids wrote down; its weights are still to be filled in."""
    options, config = Eagle3Options(**spec["options"]), LlamaConfig(**spec["layer_config"])
    with torch.device(target.device):
        return Eagle3Head(options, config, spec["layer_ids"], target.embedding, draft_vocab)
