"""Medusa: several small heads on the target's last hidden state, each predicting a token further ahead.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), section 2.1;
trained with the target frozen it is the paper's Medusa-1 (section 2.2.1).

Shapes: B batch rows, L tokens, R needed rows (flat b*L+t), H target hidden, V target vocab, K heads used.

Head i of row t sees y_t, the target's post-final-norm state, and predicts x_{t+2+i}: the target's own head gives
x_{t+1}, so heads and steps of other drafters count alike.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.heads.base import DraftHead, Drafts, HeadOutput, StepOutput, Trains
from draftsmith.heads.drafters import HeadDrafter
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.target.target import Target


class ResBlock(nn.Module):
    """r(x) + SiLU(W x + b): r is x itself, or a learned projection where x is wider than the output, as Hydra's is.

    W and b are zero at first and the projection takes the state alone, so that a new head repeats the target's own
    prediction; Hydra's published code draws the projection at random.
    """

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden_size)
        self.res_connection = nn.Linear(width, hidden_size) if width != hidden_size else nn.Identity()
        with torch.no_grad():
            for part in self.parameters():
                nn.init.zeros_(part)
            if isinstance(self.res_connection, nn.Linear):
                self.res_connection.weight[:, :hidden_size].fill_diagonal_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., H]."""
        return self.res_connection(x) + F.silu(self.linear(x))


class MedusaHead(DraftHead):
    """Medusa's heads. Parameters: `blocks.{i}.{j}.linear.{weight,bias}` and, with projections of their own,
    `lm_heads.{i}.weight` [V, H]. Weights start in fp32.
    """

    method: ClassVar[str] = "medusa"
    options_class = MedusaOptions
    needs_layers = False
    options: MedusaOptions

    def __init__(self, options: MedusaOptions, config: None, target: Target, *_: object) -> None:
        super().__init__(target_head=target.head)
        self.options = options
        self.drafts, self.trains = Drafts(options.num_heads), Trains(options.num_heads)
        V, H = target.head.weight.shape
        self.hidden_size, self.vocab_size = H, V
        heads = range(options.num_heads)
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(H, H) for _ in range(options.num_layers))) for _ in heads)
        own = () if options.original_lm_head else heads
        self.lm_heads = nn.ModuleList(nn.Linear(H, V, bias=False) for _ in own)

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Return the logits [R_i, V] of the first `num_steps` heads (all of them, if there are fewer)."""
        plan, last = self.planned(batch, num_steps), batch.last.flatten(0, 1)
        steps = [StepOutput(i, at, self.state(i, last[at]), self.projection(i)) for i, at in enumerate(plan.rows)]
        return HeadOutput(tuple(steps))

    def logits(self, head: int, last: Tensor) -> Tensor:
        """The target's state [..., H] -> draft logits [..., V] of head number `head`."""
        return self.projection(head)(self.state(head, last))

    def state(self, head: int, last: Tensor) -> Tensor:
        """The target's state [..., H] -> what the projection of head number `head` reads, [..., H]."""
        return self.blocks[head](last.to(next(self.parameters()).dtype))

    def projection(self, head: int) -> Callable[[Tensor], Tensor]:
        """Return what makes logits [..., V] of the state of head number `head`."""
        return self.project if self.options.original_lm_head else self.lm_heads[head]

    def project(self, state: Tensor) -> Tensor:
        """State [..., H] -> fp32 logits [..., V] by the target's output projection."""
        return self.target_head.logits(state)

    @classmethod
    def build(cls, options: Any, target: Target, draft_vocab: Tensor | None) -> Self:
        """Return untrained fp32 heads for `target`, their projections those of the target, with the scale of its logits."""
        assert draft_vocab is None, "Medusa predicts the whole vocabulary"
        with torch.device(target.device):
            head = cls(options, None, target)
        for lm_head in head.lm_heads:
            lm_head.weight = nn.Parameter(target.head.weight.detach().float() * target.head.scale)
        return head


class MedusaDrafter(HeadDrafter):
    """Drafts a chain, token k drawn from head k under the target's sampling settings, or a static tree of the most
    likely tokens of each head, or (drawn) of tokens sampled from it without replacement.

    All heads read the target's state at the last token, so a round is one pass and keeps nothing.
    """

    name = "medusa"
    head: MedusaHead

    def make(self, state: DecodeState) -> Draft:
        """Draft at most as many tokens as a row may still emit."""
        depth = min(self.num_speculative_tokens, state.tokens_left)
        last_BH = state.new_tokens.at_last(state.new_tokens.last_BnD)
        logits_BKV = torch.stack([self.head.logits(k, last_BH) for k in range(depth)], 1)
        return self.draft_all(state, logits_BKV)


build, load = MedusaHead.build, MedusaHead.load
