"""The base of EAGLE-3 and P-EAGLE: fused aux streams, decoder layers, a draft vocabulary and an output projection.

Shapes: B batch rows, n tokens, H draft hidden, Ht target hidden, A aux layers, V target vocab, W draft vocab, r rank;
"..." is [B, n] or [R].
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import Drafts, Reads, Trains, layer_ids_of
from draftsmith.heads.eagle import DraftShape
from draftsmith.heads.eagle.base import EagleHead, Reader
from draftsmith.heads.layers.decoder_layer import EagleAttention, EagleLayer, PlainLayer, Rotary
from draftsmith.heads.layers.from_target import derive_layer_config, start_norm
from draftsmith.heads.layers.shared import Rows, Shared
from draftsmith.heads.layers.training_pass import LayerInput, TrainingPass
from draftsmith.target.kernels import RMSNorm
from draftsmith.target.pretrained import probe_ids
from draftsmith.target.target import Target, steady_positions

_EMBEDDING_SPREAD = 0.02
"""Standard deviation of embeddings that start from nothing, as in Llama."""


class FusedHead(EagleHead):
    """A head that reads fused aux streams. Parameters carry the names of the flat EAGLE-3 layout (see formats.py).

    The target's raw input embedding [V, Ht] is shared and frozen unless it is to be trained; a draft with a width of its own
    has embeddings of its own. draft_vocab: [W] sorted target ids, or None for all of them. Weights start in
    fp32 at torch's defaults; `build` fills lm_head.
    """

    options: DraftShape
    options_class: ClassVar[type[DraftShape]]

    def __init__(
        self,
        options: DraftShape,
        config: LlamaConfig,
        target: Target,
        layer_ids: Sequence[int],
        draft_vocab: Tensor | None,
    ) -> None:
        super().__init__(draft_vocab)
        embedding = target.embedding
        (V, Ht), H, A, eps = embedding.shape, config.hidden_size, len(layer_ids), config.rms_norm_eps
        assert config.vocab_size == V
        self.options, self.config, self.window = options, config, options.sliding_window
        self.reads = Reads(tuple(layer_ids), context_length=steady_positions(config))
        self.trains = Trains(options.steps)
        # A longer draft would lose sight of its own root.
        self.drafts = Drafts(self.window)
        # Embeddings to train are a copy: the target must not learn with the head.
        own = options.train_embeddings
        if self.shares_width(Ht):
            embedding = embedding.detach().to(torch.float32, copy=True) if own else embedding.detach()
            self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=not own)
        else:
            self.embed_tokens = nn.Embedding(V, H).requires_grad_(own)
            nn.init.normal_(self.embed_tokens.weight, std=_EMBEDDING_SPREAD)
        self.input_norm = RMSNorm(A * Ht, eps=eps) if options.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(Ht, eps=eps) for _ in layer_ids) if options.fc_norm else None
        self.fc = nn.Linear(A * Ht, H, bias=False)
        above = [PlainLayer(config) for _ in range(options.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([Eagle3Layer(config, options.norm_before_residual), *above])
        self.norm = RMSNorm(H, eps=eps)
        W, rank = V if draft_vocab is None else len(draft_vocab), options.lm_head_rank
        self.lm_head = nn.Linear(H, W, bias=False) if rank is None else LowRankLinear(H, W, rank)
        self.lm_head.requires_grad_(options.train_lm_head)
        self.rotary_emb = Rotary(config)

    def shares_width(self, target_hidden: int) -> bool:
        """Whether the draft is as wide as a target of that hidden size."""
        return self.config.hidden_size == target_hidden

    def initial_hidden(self, aux: Tensor, last: Tensor) -> Tensor:
        """The fused aux streams; the last states are not read."""
        return self.fuse(aux)

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux streams [B, n, A*Ht] -> the hidden state of step 0, [B, n, H]."""
        aux = aux.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            aux = torch.cat(
                [norm(x) for norm, x in zip(self.fc_norm, aux.chunk(len(self.fc_norm), -1), strict=True)], -1
            )
        return self.fc(aux)

    def lr_factor(self, name: str) -> float:
        """Return a smaller rate for an `fc` whose weights `build` made smaller, in the same proportion."""
        if name != "fc.weight" or self.options.norm_before_residual:
            return 1.0
        weight = self.fc.weight.detach()
        # torch starts a linear layer uniformly up to 1 / sqrt(fan-in), of this spread.
        return min(1.0, float(weight.square().mean().sqrt()) * (3 * self.fc.in_features) ** 0.5)

    def layer_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., H] -> the attention's input [..., 2H] and the residual [..., H]."""
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer.layer_input(embedded, hidden)

    def reader(self, batch: TrainBatch, passing: TrainingPass, num_steps: int) -> Reader:
        """Return what makes the first layer's input: a token's part of queries, keys and values is computed once for all steps, where
        they read more tokens in all than the batch has."""
        if num_steps * len(passing.plan.rows) < batch.ids.numel():
            return super().reader(batch, passing, num_steps)
        layer, width = self.layers[0], self.config.hidden_size
        assert isinstance(layer, Eagle3Layer)
        normed_TH = layer.input_layernorm(self._embed(batch.ids.flatten()))
        table = Shared(passing.layers[0].heads(normed_TH, columns=slice(width)))

        def read(rows: Tensor, step: int, hidden: Tensor) -> LayerInput:
            # Behind a text's end any token serves: no row that counts reads it.
            tokens = (rows + (1 + step)).clamp_max(batch.ids.numel() - 1)
            return LayerInput(*layer.hidden_input(hidden), Rows(table, tokens), slice(width, None))

        return read

    def logits(self, out: Tensor) -> Tensor:
        """The last layer's output [..., H] -> draft logits [..., W]."""
        return self.lm_head(self.norm(out))

    def feedback(self, out: Tensor) -> Tensor:
        """The last layer's output [..., H] is the hidden state of the next step."""
        return out

    def served(self) -> Self:
        """The head with its output projection multiplied out, where that is of low rank."""
        if not isinstance(self.lm_head, LowRankLinear):
            return self
        whole, product = copy(self), self.lm_head.product()
        whole._modules = {**self._modules}  # of which the copy has others
        whole.options = replace(self.options, lm_head_rank=None)
        whole.lm_head = nn.Linear(product.shape[1], product.shape[0], bias=False, device="meta")
        whole.lm_head.weight = nn.Parameter(product, requires_grad=self.options.train_lm_head)
        return whole

    @classmethod
    def build(cls, options: DraftShape, target: Target, draft_vocab: Tensor | None) -> Self:
        """Return an untrained fp32 head for `target`, its final norm the target's and its lm_head the target's rows of the draft
        vocabulary, or what of low rank comes closest to them; one of another width starts at random.

        draft_vocab: [W] sorted unique target ids, or None for all. Raises UserError for layer ids that the target does not have
        and for dimensions that do not fit together.
        """
        layer_ids = layer_ids_of(options, target)
        target.check_layer_ids(layer_ids)
        options.check_adopted()
        vocab = None if draft_vocab is None else draft_vocab.to(target.device, torch.int64)
        assert vocab is None or bool((vocab.diff() > 0).all()), "the draft vocabulary is sorted and unique"
        config = derive_layer_config(options, target)
        _check_sizes(options, config, target, target.vocab_size if vocab is None else len(vocab))
        with torch.device(target.device):
            head = cls(options, config, target, layer_ids, vocab)
        if not options.norm_before_residual:
            _normalise_streams(head, target)
        if head.shares_width(target.hidden_size):
            _start_as_the_target(head, target)
        return head


@torch.no_grad()
def _start_as_the_target(head: FusedHead, target: Target) -> None:
    """Let the head's projection and final norm compute the target's logits of the draft vocabulary."""
    left = start_norm(head.norm, target, target.head.scale)
    vocab = slice(None) if head.draft_vocab is None else head.draft_vocab
    weight = target.head.weight[vocab].detach().float() * left
    if isinstance(head.lm_head, LowRankLinear):
        head.lm_head.approximate(weight)
    else:
        head.lm_head.weight.copy_(weight)


@torch.no_grad()
def _normalise_streams(head: FusedHead, target: Target) -> None:
    """Divide `fc` by the RMS of the fused streams where that is above one, the size of what the layers add to them.

    Raw streams grow from layer to layer, to an RMS of ten and more, next to which the output of a randomly initialised
    layer is negligible for a long time. The RMS is the median over random tokens, since single tokens have states a
    thousand times larger.
    """
    aux = target.forward(probe_ids(target), layer_ids=head.reads.layer_ids).aux
    # Smaller streams stay as they are: scaled up, heads learned worse.
    head.fc.weight.div_(head.fuse(aux).square().mean(-1).sqrt().median().clamp_min(1.0))


def _check_sizes(options: DraftShape, config: LlamaConfig, target: Target, draft_tokens: int) -> None:
    """Raise UserError for a rank that saves nothing, and for a draft of another width than the target's with frozen
    weights."""
    H, rank = config.hidden_size, options.lm_head_rank
    if rank is not None and rank >= min(draft_tokens, H):
        raise UserError(
            f"head.lm_head_rank is {rank}, but the output projection is {draft_tokens} by {H}: give less than both, or "
            "null for a full matrix."
        )
    if target.hidden_size == H:
        return
    for name in ("train_embeddings", "train_lm_head"):
        if not getattr(options, name):
            raise UserError(
                f"head.hidden_size is {H} and the target's is {target.hidden_size}, so that nothing of the target's fits: set "
                f"head.{name} to true, or leave head.hidden_size out."
            )


class Eagle3Layer(EagleLayer):
    """The first decoder layer of EAGLE-3: a Llama layer whose attention reads [embedding, hidden]."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.self_attn = EagleAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def layer_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [..., H] -> the attention's input [..., 2H] and the residual [..., H]."""
        normed, residual = self.hidden_input(hidden)
        return torch.cat([self.input_layernorm(embedded), normed], -1), residual

    def hidden_input(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden half of the attention's input and the residual, each [..., H]."""
        normed = self.hidden_norm(hidden)
        return normed, normed if self.norm_before_residual else hidden


class LowRankLinear(nn.Module):
    """A projection [..., H] -> [..., W] without a bias that goes through r numbers: r * (H + W) weights, not H * W."""

    def __init__(self, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., W]."""
        return self.up(self.down(x))

    @torch.no_grad()
    def product(self) -> Tensor:
        """Return the one matrix [W, H] that computes the same, to rounding."""
        return self.up.weight @ self.down.weight

    @torch.no_grad()
    def approximate(self, weight_WH: Tensor) -> None:
        """Take the product of this rank that is closest to `weight_WH` by the sum of squares (Eckart and Young, 1936).

        Its rows are projected onto the r directions in which they are largest: eigenvectors of the [H, H] matrix of their
        products, since a decomposition of all W rows would take W / H times as long.
        """
        weight_WH = weight_WH.to(self.up.weight)
        largest_Hr = torch.linalg.eigh(weight_WH.T @ weight_WH).eigenvectors[:, -self.down.out_features :]
        self.down.weight.copy_(largest_Hr.T)
        self.up.weight.copy_(weight_WH @ largest_Hr)
