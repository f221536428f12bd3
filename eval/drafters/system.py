"""Describe a drafter for an evaluation: how it drafts, which rule accepts its tokens, how its acceptance is simulated.

K: num_speculative_tokens.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.decoder.answers import Decoded, Generation, Request
from draftsmith.decoder.cache import KVCache, entry_bytes
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import Drafter, LengthRule
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.decoder.verify import Typical
from draftsmith.errors import UserError
from draftsmith.eval.simulate.texts import Simulation, Simulator, head_simulator, simulate_together
from draftsmith.fields import LATER
from draftsmith.heads.base import DraftHead
from draftsmith.heads.quantized import quantize_head, weight_bytes
from draftsmith.heads.registry import find_method
from draftsmith.target.kernels import pack_linears
from draftsmith.target.target import Target

DrafterFactory = Callable[[int], Drafter]
"""From a draft length to a drafter."""

Simulate = Callable[[Target, Sequence[Generation], Sampling, int], Simulation]
"""From target, its answers, their sampling settings and max_k to tallies for drafts of 1..max_k tokens."""

Tree = StaticTree | DynamicTree

BUDGETS = (8, 16, 32, 64, 128, 256, 512)
"""The total_tokens of growing trees that are simulated by default, those below the tree's own."""


@dataclass(frozen=True)
class DraftInfo:
    """How a drafter drafts.

    method: of its head, or the kind of a baseline. num_speculative_tokens: length of its chain or depth of its tree. nodes: most
    tokens that a round adds to a target pass. tree: null for a chain. lossy: its texts do not follow the target's distribution.
    parameters: the head's trained ones (and an adapter's), or those of the draft model. tuned: a target that was tuned with it
    verifies its drafts. layer_ids: the target's layers that the head reads; num_heads: of Medusa; both are what engines are told.
    engine_tokens: the draft length that they are told whatever K is planned, null where it is K. exported: whether an export drafts so
    in engines: with the window that the head was trained with, and all of its passes. engines_without: see the function.
    trained_length: tokens of the longest text that the head learned from, null where that is not recorded. weights: what a head's
    are rounded to, null for as they are; weight_bytes: of these, or of the draft model's. cache_bytes: of a token in the KV cache of
    its own, 0 without one; cache_slots: what a row of it holds beyond its text. vocabulary: the tokens that a head drafts among, 0
    for all of the target's.
    """

    method: str
    num_speculative_tokens: int
    nodes: int
    tree: str | None = None
    lossy: bool = False
    parameters: int | None = None
    tuned: bool = False
    layer_ids: tuple[int, ...] = ()
    num_heads: int = 0
    trained_length: int | None = None
    weights: str | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None
    cache_slots: int | None = None
    vocabulary: int | None = None
    engine_tokens: int | None = field(default=None, metadata=LATER)
    exported: bool = field(default=True, metadata=LATER)
    engines_without: tuple[str, ...] = field(default=(), metadata=LATER)

    def unlike(self, other: "DraftInfo") -> str:
        """Return what makes it another drafter than `other`, as far as both say, in words that follow "has"; empty for the same.

        Chains of other lengths are the same drafter, trees of other sizes are not: a chain can be cut, a tree cannot."""
        kinds = {"method": "the method {}", "parameters": "{} parameters", "vocabulary": "{} tokens to draft among"}
        pairs = [(words, getattr(self, name), getattr(other, name)) for name, words in kinds.items()]
        pairs.append(("weights {}", self.weights or "unrounded", other.weights or "unrounded"))
        own, its = (f"the tree {one.tree}" if one.tree else "a chain" for one in (self, other))
        pairs.append(("{}", own, its))
        if self.tree and other.tree:
            pairs.append(("{} levels", self.num_speculative_tokens, other.num_speculative_tokens))
            pairs.append(("{} drafted tokens", self.nodes, other.nodes))
        return ", ".join(
            f"{words.format(one or 'all')} and not {two or 'all'}"
            for words, one, two in pairs
            # Earlier versions counted no parameters of a head with rounded weights; 0 tokens to draft among are all.
            if None not in (one, two) and one != two and (all((one, two)) or "to draft" in words)
        )


@dataclass(frozen=True)
class Way:
    """Who writes: a drafter, the target that verifies it, and the lossy rule that accepts, if one does."""

    target: Target
    drafter: Drafter
    typical: Typical | None = None

    def decode(self, requests: Sequence[Request], sampling: Sampling, rows: int = 1) -> Decoded:
        """Answer requests, at most `rows` at once."""
        return decode_batch(self.target, self.drafter, requests, sampling, self.typical, rows=rows)


@dataclass(frozen=True)
class SystemUnderTest:
    """One drafter of an evaluation.

    method, parameters, trained_length, weights, weight_bytes, engines_without: see `DraftInfo`. make: drafter of a draft length up to max_k.
    num_speculative_tokens: K of the decoded run. tree: None for a chain. drawn: a static tree's children are drawn from the head's
    distribution. typical: the lossy rule, None for lossless acceptance. simulate: None where acceptance cannot be computed from the
    text alone. fixed_length: every round drafts as many tokens as fit, so that K tells what a round costs. fingerprint: of the draft
    model. head: None for a baseline. verifier: the target that was tuned with the head and verifies its drafts, None for the
    evaluation's own. window: of the head's attention, None for the one that it was trained with. rule: where its chains end, None for chains of one length. whole: what a head drafts depends on the text alone, not
    on its own tokens. shape: the name of a baseline's tree. most_nodes: tokens of its largest target pass, None for the root and K. budgets: total_tokens of its tree, that
    are simulated in the same pass.
    """

    name: str
    method: str
    make: DrafterFactory
    num_speculative_tokens: int
    max_k: int
    tree: Tree | None = None
    drawn: bool = False
    typical: Typical | None = None
    simulate: Simulate | None = None
    fixed_length: bool = True
    parameters: int | None = None
    fingerprint: str | None = None
    head: DraftHead | None = None
    verifier: Target | None = None
    rule: LengthRule | None = None
    whole: bool = False
    trained_length: int | None = None
    weights: str | None = None
    window: int | None = None
    weight_bytes: int = 0
    shape: str | None = None
    most_nodes: int | None = None
    budgets: tuple[int, ...] = ()
    engines_without: tuple[str, ...] = ()

    @property
    def counts_drafts(self) -> bool:
        """Whether a simulation knows how many tokens are drafted. With a rule only where the text tells them: where another draft ends
        depends on its own tokens, which behind a rejected one are not the text's."""
        return self.rule is None or self.whole

    @property
    def lossless(self) -> bool:
        """Whether its texts follow the distribution of the target that verifies its drafts."""
        return self.typical is None

    def verified_by(self, target: Target) -> Target:
        """Return the target that verifies its drafts in an evaluation of `target`."""
        return target if self.verifier is None else self.verifier

    def way(self, target: Target) -> Way:
        """Return how it writes in an evaluation of `target`, with the draft length of the decoded run."""
        return Way(self.verified_by(target), self.make(self.num_speculative_tokens), self.typical)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The draft lengths to report: all up to max_k where each can be simulated, else that of the run."""
        return tuple(range(1, self.max_k + 1)) if self.simulate is not None else (self.num_speculative_tokens,)

    def nodes(self, k: int) -> int:
        """Most tokens that the target reads in a round with drafts of length `k`, the root included."""
        if self.tree is None:
            return self.most_nodes or 1 + k
        return cut_tree(self.tree, k).max_nodes

    @property
    def info(self) -> DraftInfo:
        """The drafter's entry in result.json. It begins a batch of one row of one token, to see the cache that this takes."""
        drafter = self.make(self.num_speculative_tokens)
        drafter.start(1, 1)
        cache: KVCache | None = getattr(drafter, "cache", None)
        vocab = None if self.head is None else self.head.draft_vocab
        vocabulary = None if self.head is None else 0 if vocab is None else len(vocab)
        return DraftInfo(
            method=self.method,
            num_speculative_tokens=self.num_speculative_tokens,
            nodes=self.nodes(self.num_speculative_tokens) - 1,
            tree=self.shape if self.tree is None else tree_name(self.tree, self.drawn),
            lossy=not self.lossless,
            parameters=self.parameters,
            tuned=self.verifier is not None,
            layer_ids=() if self.head is None else tuple(self.head.reads.layer_ids),
            num_heads=0 if self.head is None else getattr(self.head.options, "num_heads", 0),
            trained_length=self.trained_length,
            weights=self.weights,
            weight_bytes=self.weight_bytes,
            cache_bytes=0 if cache is None else entry_bytes(cache.shapes),
            cache_slots=0 if cache is None else cache.capacity - 1,
            vocabulary=vocabulary,
            engine_tokens=None if self.head is None else self.head.engine_tokens,
            exported=self.window is None and (self.head is None or self.head.in_engines() is self.head),
            engines_without=self.engines_without,
        )


def simulate_systems(
    target: Target, systems: Sequence[SystemUnderTest], generations: Sequence[Generation], sampling: Sampling
) -> list[Simulation]:
    """Simulate drafters that `target` verifies on its own finished answers: it reads them once for all of them."""
    reading = [(c.simulate, c.max_k) for c in systems if isinstance(c.simulate, Simulator)]
    together = iter(simulate_together(target, generations, sampling, reading) if reading else [])
    simulations = []
    for c in systems:
        assert c.simulate is not None
        alone = not isinstance(c.simulate, Simulator)  # from the texts, without the target
        simulations.append(c.simulate(target, generations, sampling, c.max_k) if alone else next(together))
    return simulations


def cut_tree(tree: Tree, depth: int) -> Tree:
    """Return the tree no deeper than `depth`."""
    return replace(tree, depth=min(tree.depth, depth)) if isinstance(tree, DynamicTree) else tree.cut(depth)


def tree_name(tree: Tree, drawn: bool) -> str:
    """Return a tree's name, and whether its children are drawn."""
    return f"{tree.name}, drawn" if drawn else tree.name


def head_system(
    name: str,
    head: DraftHead,
    num_speculative_tokens: int,
    max_k: int,
    *,
    tree: Tree | None = None,
    drawn: bool = False,
    typical: Typical | None = None,
    verifier: Target | None = None,
    rule: LengthRule | None = None,
    weights: str | None = None,
    window: int | None = None,
    budgets: Sequence[int] = (),
) -> SystemUnderTest:
    """Return the drafter of `head`; its name says how it drafts. verifier, rule, weights, window: see `SystemUnderTest`. budgets: of a
    tree that is simulated while it grows; by default some up to its own, which is among them in any case.

    Draft lengths are clamped to the head's longest; a tree has its own. Raises UserError for one it cannot draft.
    """
    drafting = head if window is None else with_window(head, window)
    method, limit = find_method(head.method), drafting.clamp_draft_length(max_k)
    lengths, shape = (min(num_speculative_tokens, limit), limit), ""
    if tree is not None:
        _check_tree(tree, drawn, name, drafting)
        lengths, shape = (tree.depth, tree.depth), f" {tree_name(tree, drawn)}"
    rounded = ("" if weights is None else f", {weights}") + ("" if window is None else f", window {window}")
    until = "" if rule is None else rule.name
    lossy = "" if typical is None else ", typical (lossy)"
    tuned = ", tuned target" if "tuned" in head.trains.outputs or verifier is not None else ""
    drafting = drafting if weights is None else quantize_head(drafting, weights)
    pack_linears(drafting)

    def make(k: int) -> Drafter:
        how: dict[str, Any] = {} if tree is None else {"tree": cut_tree(tree, k), "drawn": drawn}
        return method.make_drafter(drafting, k, **how | ({} if rule is None else {"rule": rule}))

    simulate = None
    if typical is None and is_simulated(tree, drawn):
        simulate = head_simulator(drafting, tree=tree, budgets=_budgets(tree, budgets), rule=rule)
    return SystemUnderTest(
        name + rounded + until + shape + lossy + tuned,
        head.method,
        make,
        *lengths,
        tree=tree,
        drawn=drawn,
        typical=typical,
        simulate=simulate,
        fixed_length=drafting.drafts.fixed_length and rule is None,
        parameters=sum(p.numel() for p in head.parameters() if p.requires_grad),  # a view's need no gradients
        head=head,
        verifier=verifier,
        rule=rule,
        whole={"static", "best_first"} <= method.trees_of(head.options),
        weights=weights,
        window=window,
        weight_bytes=weight_bytes(head, weights),
        budgets=() if simulate is None else simulate.budgets,
    )


def _budgets(tree: Tree | None, asked: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(tree, DynamicTree):
        return ()
    return tuple(sorted({*(asked or (n for n in BUDGETS if n < tree.total_tokens)), tree.total_tokens}))


def _check_tree(tree: Tree, drawn: bool, name: str, head: DraftHead) -> None:
    """Raise UserError for a tree that the head `name` cannot draft."""
    if (kind := tree_kind(tree, drawn)) not in find_method(head.method).trees_of(head.options):
        named = getattr(head.options, "chains_alone", "")
        heads = f"{head.method} heads with {named}" if named else f"{head.method} heads"
        raise UserError(f"{heads} draft no {kind} trees: remove the tree {tree.name} from evaluate.drafts.")
    if tree.depth > (most := head.clamp_draft_length(tree.depth)):
        raise UserError(
            f"The tree {tree.name} is {tree.depth} deep but {name} drafts {most} tokens at most: take one of depth {most} or "
            "less, or give it `heads` with the names of those that reach it."
        )


def check_ranks(tree: Tree | None, name: str, head: DraftHead, target: Target) -> None:
    """Raise UserError for a tree of ranks that the head `name` has no tokens for."""
    width = target.vocab_size if head.draft_vocab is None else len(head.draft_vocab)
    if isinstance(tree, StaticTree) and tree.ranks > width:
        raise UserError(
            f"The tree {tree.name} proposes rank {tree.ranks - 1} (the most likely token has 0), but {name} drafts {width} "
            "tokens: take ranks below that."
        )


def with_window(head: DraftHead, window: int) -> DraftHead:
    """Return a head of the same weights whose attention sees no more than so many tokens, its own the last of them; `head` stays as it
    is. Raises UserError where its attention takes no window, and for one that its drafts do not fit into."""
    least, where = head.least_window, f"evaluate.drafts: window is {window}, but"
    if least is None:
        raise UserError(f"{where} {head.method} heads, or this one, have no attention that takes one: leave it out.")
    if window < least:
        raise UserError(f"{where} a draft of this {head.method} head needs {least} tokens or more: make it longer.")
    narrow = copy(head)
    # A longer draft would lose sight of its own root.
    narrow.window, narrow.drafts = window, replace(head.drafts, max_speculative_tokens=head.clamp_draft_length(window))
    return narrow


def is_simulated(tree: Tree | None, drawn: bool) -> bool:
    """Return whether the acceptance of such drafts follows from the text alone: not of children that are drawn, nor of a tree whose nodes
    are run."""
    return tree is None or tree_kind(tree, drawn) in ("static", "best_first")


def tree_kind(tree: Tree, drawn: bool) -> str:
    """Return the name that a method's `trees` has for this kind of tree."""
    if isinstance(tree, DynamicTree):
        return "dynamic" if tree.rule == "dynamic" else "best_first"
    return "drawn" if drawn else "static"
