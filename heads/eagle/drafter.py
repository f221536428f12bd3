"""How EAGLE heads propose: the decode side of their training pass, for chains, static trees and dynamic trees.

Row t pairs token x_{t+1} with a hidden state of position t. Before drafting, the rows of the newly committed tokens are
run with the target's true states (they overwrite the keys that drafting left there); the last of them gives the first
drafts. A drafted token of depth d becomes row t + d, with its parent's output as hidden state, and sees the committed
rows and the drafted ones above it. Shapes: B rows, n fresh rows, m nodes of one level that are run, T drafted rows
so far, K drafted tokens, C children of a node, H hidden, W draft vocab, S slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.eval.decode.cache import WriteRange, build_mask
from draftsmith.eval.decode.draft import DecodeState, Draft, NewTokens, Prompts, chain_above, numbers
from draftsmith.eval.decode.growth import child_uniforms, growth, start_beam
from draftsmith.eval.decode.noise import DRAFT, uniforms
from draftsmith.eval.decode.sampling import draw, draw_children, probs
from draftsmith.eval.decode.trees import DynamicTree, StaticTree
from draftsmith.heads.eagle.base import EagleHead


class EagleDrafter:
    """Drafts a chain of `num_speculative_tokens` tokens sampled under the target's settings, or a tree.

    tree: a static one, its nodes the most likely tokens of each distribution, or (drawn) sampled from it without replacement; or a
    dynamic one. greedy_drafts: a chain of argmaxes at every temperature (as vLLM does by default); lossless too, but
    accepted less often above temperature 0.
    """

    def __init__(
        self,
        head: EagleHead,
        num_speculative_tokens: int,
        *,
        tree: StaticTree | DynamicTree | None = None,
        drawn: bool = False,
        greedy_drafts: bool = False,
    ) -> None:
        assert not drawn or isinstance(tree, StaticTree)
        self.head = head.eval()
        self.name = head.method
        self.layer_ids = head.layer_ids
        # A tree has its own depth.
        self.num_speculative_tokens = num_speculative_tokens if tree is None else tree.depth
        self.tree, self.drawn, self.greedy_drafts = tree, drawn, greedy_drafts
        self.max_nodes, self._drafted_rows = self._sizes()
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._table: tuple[Tensor, Tensor] | None = None
        self._turns: list[tuple[Tensor, Tensor]] | None = None
        self._steps: tuple[Tensor, ...] = ()
        self._every = torch.empty(0)
        self._longest = 0
        # How far below the root each drafted row is; of use where the head has a window alone.
        self._below: list[int] = []

    def _sizes(self) -> tuple[int, int]:
        """Nodes of a draft, the root included; and rows that drafting adds."""
        if self.tree is None:
            return self.num_speculative_tokens + 1, self.num_speculative_tokens
        if isinstance(self.tree, StaticTree):
            return len(self.tree.choices) + 1, len(self.tree.choices)
        return self.tree.max_nodes, self.tree.depth * self.tree.branching

    def start(self, rows: int, capacity: int) -> None:
        """Allocate the draft's own keys and values, those of each layer."""
        weight, config = self.head.fc.weight, self.head.config
        # Rows that have been committed or drafted, and one more for padding behind the fresh ones.
        slots = capacity + self._drafted_rows + 1
        shape = (rows, config.num_key_value_heads, slots, config.head_dim)
        self._keys, self._values = (
            [torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in self.head.layers] for _ in range(2)
        )
        self._table = self.head.rotary_emb.table(slots, weight)
        self._every = torch.arange(slots, device=weight.device)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._keys, self._values = [x[rows] for x in self._keys], [x[rows] for x in self._values]

    @torch.no_grad()
    def admit(self, prompts: Prompts) -> None:
        """Run the rows of new prompts; the next proposal runs the last one again, to draft from it."""
        if prompts.new_tokens.tokens_Bn.shape[1] > 1:
            self._read(prompts.new_tokens, prompts.length_b, 0, prompts.rows_b)

    @torch.no_grad()
    def propose(self, state: DecodeState) -> Draft:
        """Read the fresh tokens, then draft no deeper than any row may still emit."""
        self._longest = state.longest
        rows, count = state.new_tokens.tokens_Bn.shape
        # A single row has no padding, so it begins where its fresh tokens fit; of several that is no more than a bound.
        out_BH = self._read(state.new_tokens, state.length_B, state.longest - count if rows == 1 else state.longest)
        depth = min(self.num_speculative_tokens, state.room)
        if self.tree is None:
            return self._chain(state, out_BH, depth)
        if isinstance(self.tree, StaticTree):
            return self._static(state, out_BH, self.tree, depth)
        return self._dynamic(state, out_BH, self.tree, depth)

    def _chain(self, state: DecodeState, out_BH: Tensor, depth: int) -> Draft:
        greedy = self.greedy_drafts or state.sampling.greedy
        uniform_BK = None if greedy else uniforms(state.keys_B, state.length_B, DRAFT, depth)
        tokens, draft_probs = [], []
        for k in range(depth):
            logits_BW = self.head.logits(out_BH)
            if uniform_BK is None:
                choice_B = logits_BW.argmax(-1)
            else:
                draft_probs.append(probs(logits_BW, state.sampling))
                choice_B = draw(draft_probs[-1], uniform_BK[:, k])
            tokens.append(self.head.target_ids(choice_B))
            if k + 1 < depth:
                hidden_B1H = self.head.feedback(out_BH)[:, None]
                # A single row's next token sees every slot in use, which takes no mask.
                above_B1T = (
                    None
                    if len(out_BH) == 1 and self.head.window is None
                    else chain_above(k + 1, out_BH.device)[-1:].expand(len(out_BH), -1, -1)
                )
                out_BH = self._grow(state.length_B, tokens[-1][:, None], hidden_B1H, k, above_B1T)[:, 0]
        return Draft.chain(
            state.root_B,
            torch.stack(tokens, 1),
            state.limit_B.clamp(0, depth),
            torch.stack(draft_probs, 1) if draft_probs else None,
            self.head.draft_vocab if draft_probs else None,
        )

    def _static(self, state: DecodeState, out_BH: Tensor, whole: StaticTree, depth: int) -> Draft:
        """Draft level by level down to `depth`; only nodes with children are run."""
        tree = whole.cut(depth)
        plan = growth(tree, out_BH.device)
        drawn = self.drawn and not state.sampling.greedy
        rows, out_BmH = len(out_BH), out_BH[:, None]
        tokens, draft_probs = [], []
        for step, level in enumerate(plan.levels):
            logits_BmW = self.head.logits(out_BmH)
            if drawn:
                draft_probs.append(probs(logits_BmW, state.sampling))
                first = sum(x.shape[1] for x in draft_probs[:-1])
                numbers = plan.inner_T[first : first + logits_BmW.shape[1]]
                child_BmC = draw_children(draft_probs[-1], child_uniforms(state, whole, numbers))
                choice_Bn = child_BmC[:, level.parent_n, level.sibling_n]
            else:
                best_BmR = logits_BmW.topk(min(plan.ranks, logits_BmW.shape[-1]), -1).indices
                choice_Bn = best_BmR[:, level.parent_n, level.rank_n]
            tokens.append(self.head.target_ids(choice_Bn))
            if len(level.inner_m):
                hidden_BmH = self.head.feedback(out_BmH)[:, level.parent_n[level.inner_m]]
                above_BmT = level.ancestors_mT.expand(rows, -1, -1)
                out_BmH = self._grow(state.length_B, tokens[-1][:, level.inner_m], hidden_BmH, step, above_BmT)
        draft = Draft.static(state.root_B, torch.cat(tokens, 1), tree, state.limit_B)
        return draft.drawn_from(torch.cat(draft_probs, 1)[:, plan.probs_M], self.head.draft_vocab) if drawn else draft

    def _dynamic(self, state: DecodeState, out_BH: Tensor, tree: DynamicTree, depth: int) -> Draft:
        """Grow a beam, then keep the best nodes of all levels."""
        out_BmH, beam = out_BH[:, None], start_beam(tree, state.root_B, state.limit_B)
        for level in range(depth):
            beam = beam.extend(self.head.logits(out_BmH), self.head.target_ids)
            if level + 1 < depth:
                hidden_BmH = self.head.feedback(out_BmH).gather(
                    1, beam.parent_Bm[..., None].expand(-1, -1, out_BmH.shape[-1])
                )
                out_BmH = self._grow(state.length_B, beam.tokens_Bm, hidden_BmH, level, beam.ancestors_BmT)
        return beam.draft()

    def _read(self, new_tokens: NewTokens, length_B: Tensor, first: int, rows_b: Tensor | None = None) -> Tensor:
        """Run the rows of fresh tokens, none of which begins behind slot `first`; return the output [B, H] of each
        sequence's last row."""
        rows, count = new_tokens.tokens_Bn.shape
        base_B = length_B - new_tokens.count_B
        at = WriteRange(base_B, count, first, rows_b)
        above_BnT, below = None, range(count)
        if count > 1 or not at.single or self.head.window is not None:
            above_BnT = chain_above(count, base_B.device).expand(rows, -1, -1)
        position_Bn, turn = self._positions(base_B, first, count)
        out_BnH = self.forward(
            new_tokens.tokens_Bn, self.head.begin(new_tokens), position_Bn, turn, at, above_BnT, below
        )
        if rows == 1:
            return out_BnH[:, -1]
        last_B = (new_tokens.count_B - 1).clamp(min=0)
        return out_BnH[numbers(0, rows, last_B.device), last_B]

    def _grow(
        self, length_B: Tensor, tokens_Bm: Tensor, hidden_BmH: Tensor, depth: int, above_BmT: Tensor | None
    ) -> Tensor:
        """Run drafted tokens of one depth (0 for children of the root) behind the T - m drafted rows before them.

        above_BmT: None where a single token sees all of them, and all that is committed."""
        if depth == 0:
            steps, turns = self._positions(length_B, self._longest, self.num_speculative_tokens)
            self._steps = steps.split(1, 1)
            self._turns = None if turns is None else list(zip(turns[0].split(1, 1), turns[1].split(1, 1), strict=True))
        new, total = (1, depth + 1) if above_BmT is None else above_BmT.shape[1:]
        at = WriteRange(length_B, new, self._longest + total - new, skip=total - new)
        turn = None if self._turns is None else self._turns[depth]
        below = self._below = [*self._below[: total - new], *[depth] * new]
        return self.forward(tokens_Bm, hidden_BmH, self._steps[depth].expand_as(tokens_Bm), turn, at, above_BmT, below)

    def _positions(self, base_B: Tensor, first: int, count: int) -> "tuple[Tensor, tuple[Tensor, Tensor] | None]":
        """Return `count` positions per row from `base_B` on, and their cosines and sines if these are in a table.

        first: where a single row begins, whose positions are then one slice."""
        if len(base_B) == 1 and self._table is not None:
            here = slice(first, first + count)
            return self._every[None, here], (self._table[0][None, here], self._table[1][None, here])
        position_Bn = base_B[:, None] + numbers(0, count, base_B.device)
        table = self._table
        return position_Bn, None if table is None else (table[0][position_Bn], table[1][position_Bn])

    def forward(
        self,
        tokens_Bm: Tensor,
        hidden_BmH: Tensor,
        position_Bm: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        at: WriteRange,
        above_BmT: Tensor | None,
        below: Sequence[int],
    ) -> Tensor:
        """One pass of the head's layers over the last m of T rows that follow the committed ones.

        turn: cosines and sines of the positions, where they are known. below: how many positions each of the T rows is
        behind the first of them."""
        mask, window = None, self.head.window
        if above_BmT is not None:
            depth_BT = None if window is None else torch.tensor([below], device=at.lengths_B.device)
            depth_BT = None if depth_BT is None else depth_BT.expand(len(above_BmT), -1)
            mask = build_mask(at.lengths_B, above_BmT, at.visible, depth_BT, window)

        def update(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return at.store(self._keys[layer], keys), at.store(self._values[layer], values)

        return self.head.layer(tokens_Bm, hidden_BmH, position_Bm, update, mask, turn)
