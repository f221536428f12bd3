"""Record what a drafter proposes in each round of decoding, and hold it against the training pass, for the checks of
eval/conformance/suite.py.

Shapes: b admitted rows, k drafted tokens, N nodes of a draft, M those up to the last with children, W draft vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.data.batch import Tokenized
from draftsmith.decoder.answers import Decoded, Request, Tally
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, Draft, Drafter, Prompts
from draftsmith.decoder.sampling import Sampling, probs
from draftsmith.eval.conformance.spec import Spec, pack
from draftsmith.target.target import Target

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
CLOSE = 1e-4
"""Distributions may differ by this in total variation: float32 rounds differently in a pass over a text and in a cached one."""
FEW = 20
"""Comparisons need at least so many rounds or drafts to mean anything."""
LEARN = ": raise Spec.learning_rate or Spec.steps if the head has learned too little"

Draw = tuple[Tensor, int]
"""A distribution [W] and the column that was drawn from it."""


@dataclass(frozen=True)
class Drafted:
    """A tree drafted in one round of an answer; a chain is one whose nodes have one child each.

    text: up to the root. tokens, parents: of the nodes 1 to N - 1; node 0 is the root. probs_MW: the distribution that each
    node's children were drawn from, None where they were chosen deterministically. vocab_W: the target ids of the columns,
    None for the target's whole vocabulary.
    """

    text: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs_MW: Tensor | None
    vocab_W: Tensor | None

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain."""
        return self.parents == tuple(range(len(self.tokens)))

    @property
    def sample(self) -> Tokenized:
        """The text followed by a chain, as a training sample whose first supervised row is the round's."""
        ids = torch.tensor([*self.text, *self.tokens])
        return Tokenized(ids, torch.arange(len(ids)) >= len(self.text) - 1, "", "")

    def draws(self) -> list[Draw]:
        """Return, for every node but the root, the distribution without its earlier siblings, and the column drawn from
        it. Children drawn when no probability was left are never accepted, and are left out."""
        assert self.probs_MW is not None
        draws = []
        for node in range(len(self.probs_MW)):
            left_W = self.probs_MW[node].double()
            for child in self._children(node):
                if float(left_W.sum()) < 1e-4:
                    break
                token, vocab_W = self.tokens[child - 1], self.vocab_W
                column = token if vocab_W is None else int(torch.searchsorted(vocab_W.cpu(), token))
                left_W = left_W / left_W.sum()
                draws.append((left_W, column))
                left_W = left_W.index_fill(0, torch.tensor(column), 0.0)
        return draws

    def branches(self) -> list["Drafted"]:
        """Return each path from the root to a leaf as a chain."""
        assert self.probs_MW is not None
        chains = []
        for leaf in range(1, len(self.tokens) + 1):
            if self._children(leaf):
                continue
            path = [leaf]
            while self.parents[path[0] - 1] > 0:
                path.insert(0, self.parents[path[0] - 1])
            tokens = tuple(self.tokens[node - 1] for node in path)
            above = [self.parents[node - 1] for node in path]
            chains.append(Drafted(self.text, tokens, tuple(range(len(path))), self.probs_MW[above], self.vocab_W))
        return chains

    def _children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents, 1) if parent == node]


class Recorder:
    """A drafter that passes on another one's drafts and keeps them, row by row, per prompt."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.layer_ids, self.max_nodes = drafter.name, drafter.layer_ids, drafter.max_nodes
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self.by_prompt: dict[tuple[int, ...], list[Drafted]] = {}
        self._prompts: list[tuple[int, ...]] = []

    def start(self, rows: int, capacity: int) -> None:
        """Begin a batch."""
        self._prompts = [()] * rows
        self.drafter.start(rows, capacity)

    def admit(self, prompts: Prompts) -> None:
        """Remember which prompts take which rows."""
        for row, ids, length in zip(prompts.rows_b.tolist(), prompts.ids_bL, prompts.length_b, strict=True):
            self._prompts[row] = tuple(ids[: int(length)].tolist())
        self.drafter.admit(prompts)

    def select(self, rows: Tensor) -> None:
        """Keep only these batch rows."""
        self._prompts = [self._prompts[row] for row in rows.tolist()]
        self.drafter.select(rows)

    def propose(self, state: DecodeState) -> Draft:
        """Keep the draft of every row, without its padding; its text is known when the answer is."""
        draft = self.drafter.propose(state)
        for row, prompt in enumerate(self._prompts):
            nodes = int(draft.nodes_B[row])
            tokens, parents = (tuple(x[row, 1:nodes].tolist()) for x in (draft.tokens_BN, draft.parents_BN))
            probs_MW = None if draft.draft_probs_BMW is None else draft.draft_probs_BMW[row, : nodes - 1].float().cpu()
            self.by_prompt.setdefault(prompt, []).append(Drafted((), tokens, parents, probs_MW, draft.vocab_W))
        return draft


def record(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, rows: int | None = None
) -> tuple[Decoded, list[list[Drafted]]]:
    """Answer `requests`, whose prompts differ, with chains; return the answers and the rounds of each."""
    decoded, answers = _record(target, drafter, requests, sampling, rows)
    chains = all(drafted.is_chain for answer in answers for drafted in answer)
    require(chains, f"{drafter.name} drafts no chain although it was given no tree")
    return decoded, answers


def record_trees(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, rows: int | None = None
) -> list[Drafted]:
    """Answer `requests`, whose prompts differ, with drawn trees; return the trees that have more nodes than the
    root."""
    trees = [drafted for answer in _record(target, drafter, requests, sampling, rows)[1] for drafted in answer]
    named = all(drafted.probs_MW is not None for drafted in trees)
    require(named, f"the drawn trees of {drafter.name} do not name the probabilities that they are drawn from")
    return [drafted for drafted in trees if drafted.tokens]


def _record(
    target: Target, drafter: Drafter, requests: Sequence[Request], sampling: Sampling, rows: int | None
) -> tuple[Decoded, list[list[Drafted]]]:
    """Return the answers, and what was drafted in each round of each."""
    recorder = Recorder(drafter)
    decoded = decode_batch(target, recorder, requests, sampling, rows=rows)
    answers = []
    for generation in decoded.generations:
        prompt = generation.request.prompt_ids
        text = (*prompt, *generation.output_ids)
        # Finished rows go on drafting for a while; those drafts are not used.
        rounds = zip(generation.rounds, recorder.by_prompt.get(prompt, ()), strict=False)
        answers.append([replace(drafted, text=text[: len(prompt) + r.root + 1]) for r, drafted in rounds])
    return decoded, answers


def require(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with the sentence `otherwise` unless `holds`, also under `python -O`."""
    if not holds:
        raise AssertionError(f"{otherwise[0].upper()}{otherwise[1:]}.")


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether both are None, or tensors of the same numbers."""
    return a is b if a is None or b is None else torch.equal(a.cpu(), b.cpu())


def figures(tally: Tally) -> Tensor:
    """Return the counts of a tally that simulated and decoded rounds must have in common."""
    return torch.tensor([tally.tokens, tally.rounds, tally.drafted, *tally.accepted_K, *tally.reached_K])


def drawn_from(draws: Sequence[Draw]) -> bool:
    """Return whether tokens can have been drawn from the distributions that they come with. For tokens drawn from q,
    log q has the mean -H(q), so that the differences sum to a few standard deviations at most."""
    excess = variance = 0.0
    for probs_W, column in draws:
        log_W = probs_W.double().clamp_min(1e-300).log()
        mean = float((probs_W * log_W).sum())
        excess += float(log_W[column]) - mean
        variance += float((probs_W * log_W**2).sum()) - mean**2
    return abs(excess) <= 4.5 * max(variance, 0.0) ** 0.5 + 1e-6


def require_training_probs(spec: Spec, rounds: Sequence[Drafted], sampling: Sampling) -> None:
    """Require that drafted tokens, or the probabilities they were drawn from, are the training pass's for the same
    text."""
    for drafted, logits_kW in zip(rounds, _training_logits(spec, rounds), strict=True):
        for k, token in enumerate(drafted.tokens):
            if drafted.probs_MW is None:
                ids = spec.head.target_ids(torch.arange(logits_kW.shape[1]))
                gap = float(logits_kW[k].max() - logits_kW[k][ids == token].sum())
                message = (
                    f"draft token {k + 1} is not the training pass's most likely one (its logit is {gap:.3g} lower)"
                )
                require(gap < 1e-3, message)
            else:
                apart = float((probs(logits_kW[k], sampling) - drafted.probs_MW[k]).abs().sum()) / 2
                message = f"the probabilities of draft token {k + 1} differ from the training pass's by {apart:.3g}"
                require(apart < CLOSE, message)
        if drafted.probs_MW is not None:
            same = equal(drafted.vocab_W, spec.head.draft_vocab)
            require(same, "a draft's probabilities are over other tokens than the head's draft vocabulary")


@torch.no_grad()
def _training_logits(spec: Spec, rounds: Sequence[Drafted]) -> list[Tensor]:
    """Return the training pass's logits [k, W] of each round's drafted tokens, on the text followed by the draft."""
    batch = pack(spec, [[drafted.sample] for drafted in rounds])
    steps, length = spec.head.eval()(batch, spec.length).steps, batch.ids.shape[1]
    table = [dict(zip(step.rows.tolist(), step.logits.float().cpu(), strict=True)) for step in steps]
    roots = [row * length + len(drafted.text) - 2 for row, drafted in enumerate(rounds)]
    return [torch.stack([table[k][root] for k in range(len(d.tokens))]) for root, d in zip(roots, rounds, strict=True)]
