"""P-EAGLE: EAGLE-3's inputs, all tokens of a draft in one pass (parallel drafting).

Hui et al., "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (2026); what a row sees and where it stands follow
vLLM's `parallel_drafting` and the package speculators.

Shapes: B batch rows, L tokens, R rows of one depth (flat b*L+t), U rows of depth 0, n entries of one decoding call, H draft hidden, Ht
target hidden, A aux layers.

Depth d of row t predicts x_{t+2+d} and stands at RoPE position t+d. Depth 0 reads x_{t+1} and the target's streams of
position t, as EAGLE-3 does; deeper ones read the embedding of a mask token and learnt streams in their place, so that
they need not wait for the tokens between. A row of depth d sees depth 0 of the rows j <= t, and depths 1..d of its own.

Training takes fewer rows the deeper they are, by a draw per document: all depths of all rows would be as many times the rows as
there are depths.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.draft import DecodeState, Draft, NewTokens, numbers
from draftsmith.decoder.sampling import SAMPLE, uniforms
from draftsmith.errors import UserError
from draftsmith.heads.base import HeadOutput, StepOutput, iterate_supervised_rows
from draftsmith.heads.eagle.base import EagleDrafter, EagleHead
from draftsmith.heads.eagle.fused import FusedHead
from draftsmith.heads.layers.row_plan import plan_rows
from draftsmith.heads.layers.training_pass import LayerInput, TrainingPass
from draftsmith.heads.peagle import PEagleOptions
from draftsmith.heads.plan import Plan, plan_queries
from draftsmith.target.target import Target
from draftsmith.target.tokens import spare_tokens


class PEagleHead(FusedHead):
    """The P-EAGLE drafter: EAGLE-3's parameters and `mask_hidden` [1, 1, A*Ht], the streams of tokens not drafted yet.

    options: with the mask token's id.
    """

    method: ClassVar[str] = "peagle"
    options_class = PEagleOptions
    options: PEagleOptions

    @classmethod
    def build(cls, options: Any, target: Target, draft_vocab: Tensor | None) -> Self:
        """As `FusedHead.build`. Raises UserError for a mask token that the target lacks, too."""
        return super().build(with_mask_token(options, target), target, draft_vocab)

    @classmethod
    def load(cls, spec: dict[str, Any], target: Target, draft_vocab: Tensor | None) -> Self:
        """As `FusedHead.load`. Raises UserError for a mask token that the target lacks."""
        options = with_mask_token(PEagleOptions(**spec["options"]), target)
        return super().load({**spec, "options": asdict(options)}, target, draft_vocab)

    def __init__(self, options: PEagleOptions, *others: Any) -> None:
        """others: as of `FusedHead`."""
        super().__init__(options, *others)
        assert options.mask_token_id is not None
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))
        self.trains = replace(self.trains, no_decay=("mask_hidden",))

    def supervised(self, batch: TrainBatch) -> Iterator[Tensor]:
        """Yield the rows of docs/algorithms.md, rule 1; in training a sample of them from depth 1 on, which the documents'
        seeds alone decide."""
        masks = iterate_supervised_rows(batch)
        return sample_depths(batch, masks, self.options) if self.training else masks

    def plan(self, batch: TrainBatch, num_steps: int) -> Plan:
        """As `DraftHead.plan`: the query rows of a depth are its own, among those of the depth before."""
        plan = super(EagleHead, self).plan(batch, num_steps)
        before = (plan.rows[0], *plan.rows)
        among = tuple(torch.searchsorted(others, rows) for others, rows in zip(before, plan.rows, strict=False))
        return replace(plan, queries=tuple(plan_queries(batch, rows) for rows in plan.rows), among=among)

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Run `num_steps` depths on the text of `batch`: logits [R_d, W] each, on the rows of `supervised`."""
        plan = self.planned(batch, num_steps)
        passing = TrainingPass(*self.stack, self.rotary_emb, batch.position, plan.queries[0], num_steps, self.window)
        read = self.reader(batch, passing, 1)
        out_RH = self.first_step(read, self.initial_hidden(batch.aux, batch.last), passing)
        steps = [StepOutput(0, plan.rows[0], out_RH, self.logits)]
        masked = LayerInput(*self.layer_input(*self.mask_inputs()))
        for depth in range(1, len(plan.rows)):
            passing.narrow(plan.queries[depth], plan.among[depth])
            out_RH = passing.step(depth, masked)
            steps.append(StepOutput(depth, plan.rows[depth], out_RH, self.logits))
        return HeadOutput(tuple(steps))

    def mask_inputs(self) -> tuple[Tensor, Tensor]:
        """Return what a row of depth 1 and deeper reads: the mask token's embedding and the fused `mask_hidden`, [1, H]
        each."""
        # Filled in, since a tensor made of a number would wait for the device.
        token = torch.full((1,), cast(int, self.options.mask_token_id), device=self.mask_hidden.device)
        return self._embed(token), self.fuse(self.mask_hidden[0])


def with_mask_token(options: PEagleOptions, target: Target) -> PEagleOptions:
    """Return the options with the id of the mask token. Raises UserError for one outside the target's vocabulary."""
    token, V = options.mask_token_id, target.vocab_size
    if token is None:
        pad = getattr(target.config, "pad_token_id", None)
        token = None if pad in target.eos_ids else pad  # the end is in every text
        reserved = () if target.directory is None else spare_tokens(target.directory, target.eos_ids)
        usable = [x for x in (token, *reserved, *target.eos_ids) if isinstance(x, int) and 0 <= x < V]
        if not usable:
            raise UserError(
                f"The target {target.path} names neither a padding token nor an end token: set head.mask_token_id to a token "
                "that texts seldom hold."
            )
        token = usable[0]
    if not 0 <= token < V:
        raise UserError(
            f"head.mask_token_id is {token}, but the target has tokens 0 to {V - 1}: choose one of these, or null."
        )
    return replace(options, mask_token_id=token)


def sample_depths(batch: TrainBatch, masks: Iterator[Tensor], options: PEagleOptions) -> Iterator[Tensor]:
    """Yield the rows [B, L] bool of depth 0, 1, ..., `options.depths` of them: all that `masks` yields first, then of those kept
    before which `masks` still counts so many: of n rows of a document at depth d int((n - d) * max(keep**d, keep_min)), or all
    where there are no more.

    The draw is by the documents' seeds and the rows' positions alone: the same however documents are packed.
    """
    first_BL = next(masks)
    plan = plan_rows(batch.document, first_BL)
    number_U = plan.documents.flatten()[plan.rows]
    count_D = torch.bincount(number_U, minlength=int(plan.documents.max()) + 1)
    seeds_U, place_U = batch.seeds.flatten()[plan.rows], batch.position.flatten()[plan.rows]
    uniform_US = uniforms(seeds_U, place_U, SAMPLE, options.depths)
    kept_U = torch.ones_like(plan.rows, dtype=torch.bool)
    yield first_BL
    for depth in range(1, options.depths):
        pool_U = kept_U & next(masks).flatten()[plan.rows]
        share = max(options.keep**depth, options.keep_min)
        wanted_D = ((count_D - depth).clamp(min=0).double() * share).long()
        rank_U = plan.ranks(torch.where(pool_U, uniform_US[:, depth], 2.0))
        kept_U = pool_U & (rank_U < wanted_D[number_U])
        yield torch.zeros_like(first_BL).flatten().index_fill(0, plan.rows[kept_U], True).view_as(first_BL)


class PEagleDrafter(EagleDrafter):
    """Drafts a chain, token k from the distribution of depth k, or a static tree of the most likely tokens of each
    depth, or (drawn) of tokens sampled from it without replacement. greedy_drafts: a chain of argmaxes at every
    temperature.

    One pass per round runs the new tokens and, right behind the last one, a mask entry for each further draft token.
    """

    head: PEagleHead

    @torch.no_grad()
    def start(self, rows: int, capacity: int) -> None:
        """Allocate the cache of the head's layers, and fuse the streams of mask entries."""
        super().start(rows, capacity)
        self._mask_hidden_1H = self.head.mask_inputs()[1]

    def most_entries(self) -> int:
        """Return the most entries behind the cached ones: mask entries and as many of padding."""
        return 2 * self.num_speculative_tokens

    def make(self, state: DecodeState) -> Draft:
        """Run the new tokens and the mask entries, and draft at most as many tokens as a row may still emit."""
        depth, new_tokens = min(self.num_speculative_tokens, state.tokens_left), state.new_tokens
        out_BnH = self.read(new_tokens, state.length_B, state.longest_before, more=depth - 1)
        row_B1 = numbers(0, len(out_BnH), out_BnH.device)[:, None]
        last_B1 = (new_tokens.count_B - 1).clamp(min=0)[:, None]
        return self.draft_all(state, self.head.logits(out_BnH[row_B1, last_B1 + numbers(0, depth, out_BnH.device)]))

    def run(self, new_tokens: NewTokens) -> Tensor:
        mask, total = self.head.options.mask_token_id, self.cache.staged.count
        assert mask is not None
        more = total - new_tokens.tokens_Bn.shape[1]
        real_Bn = numbers(0, total, new_tokens.count_B.device) < new_tokens.count_B[:, None]
        tokens_Bn = F.pad(new_tokens.tokens_Bn, (0, more)).masked_fill(~real_Bn, mask)
        hidden_BnH = F.pad(self.head.initial_hidden(new_tokens.aux_BnF, new_tokens.last_BnD), (0, 0, 0, more))
        hidden_BnH = torch.where(real_Bn[..., None], hidden_BnH, self._mask_hidden_1H)
        cache = self.cache
        return self.head.layer(tokens_Bn, hidden_BnH, cache.rotation(), cache.write, cache.chain_mask())


build, load = PEagleHead.build, PEagleHead.load
