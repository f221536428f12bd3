"""The section `evaluate` of a recipe: what is measured, on what, and how it drafts."""

from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree, StaticTree, load_tree
from draftsmith.decoder.verify import Typical
from draftsmith.errors import UserError
from draftsmith.eval.drafters.baseline_spec import BaselineSpec
from draftsmith.fields import BATCH, LATER, SHARE, TOKENS, Dtype, check_fields, require, within

TEMPERATURE = within(0, 100)
GROWING = ("dynamic", "best_first", "accum_logp")
_CHAIN = within(1, 2**13)


@dataclass(frozen=True)
class DraftSpec:
    """A way to draft with a head, and the rule that accepts."""

    tree: str = "chain"
    """chain; medusa_63, the published tree; a JSON file with a list of paths such as [[0], [1], [0, 0]]; or a tree that
    grows where the draft is confident: dynamic, EAGLE-2's; best_first, node by node; accum_logp, JetSpec's."""
    children: Literal["likely", "drawn"] | None = field(default=None, metadata=LATER)
    """Static trees: each head's most likely tokens (null is likely), or tokens drawn from its distribution."""
    depth: int | None = field(default=None, metadata=LATER | within(1, 64))
    """dynamic, best_first, accum_logp: levels of the tree; null is 6."""
    branching: int | None = field(default=None, metadata=LATER | within(1, 128))
    """The same: the most children of a node, and for dynamic the nodes of a level that go on; null is 8."""
    total_tokens: int | None = field(default=None, metadata=LATER | within(2, 1024))
    """The same: tokens that the target reads, the root included; null is 60."""
    budgets: list[int] | None = field(default=None, metadata=LATER | within(2, 1024))
    """best_first, accum_logp: other total_tokens, that are simulated in the same pass; null: 8, 16, 32, ... up to its own."""
    confidence_threshold: float | None = field(default=None, metadata=LATER | within(0, 1, above=True, below=True))
    """chain: a draft ends before the first token that is less likely than this to be reached and accepted, by the head's own
    confidences (DSpark), else by the largest probability of each token's distribution; null: it never ends early."""
    floors: list[float] | None = field(default=None, metadata=LATER | within(0, 2, items=64))
    """chain: a threshold for each token that a draft may hold, as many as there are floors; above 1 none. `search-tree --chain` finds them."""
    weights: Literal["int8", "int4", "float8", "bfloat16"] | None = field(default=None, metadata=LATER)
    """The head's linear layers with weights rounded to this, all but bfloat16 as torchao does; null: as they are. Texts stay exact."""
    window: int | None = field(default=None, metadata=LATER | TOKENS)
    """The head's attention sees no more than the last so many tokens of the text; null: as many as it was trained with."""
    heads: list[str] = field(default_factory=list, metadata=LATER)
    """Names of the heads that draft so; empty takes every head that can."""
    acceptance: Literal["lossless", "typical"] = "lossless"
    """typical is Medusa's LOSSY rule: the text no longer follows the target's distribution (above temperature 0)."""
    epsilon: float = field(default=0.09, metadata=SHARE)
    """typical: a token more likely than this is always accepted."""
    delta: float = field(default=0.3, metadata=SHARE)
    """typical: a token is accepted above delta * exp(-entropy)."""

    @property
    def typical(self) -> Typical | None:
        """The lossy rule, None for lossless acceptance."""
        return Typical(self.epsilon, self.delta) if self.acceptance == "typical" else None

    @property
    def drawn(self) -> bool:
        """Whether children are drawn from the head's distribution."""
        return self.children == "drawn"

    def is_named_by(self, other: "DraftSpec") -> bool:
        """Whether another one drafts so for one of the same heads. The same tree and rule with other thresholds would have the same name."""
        others = ("heads", "budgets", "floors", "epsilon", "delta")
        one, two = ({key: x for key, x in vars(draft).items() if key not in others} for draft in (self, other))
        together = not self.heads or not other.heads or bool(set(self.heads) & set(other.heads))
        return one == two and together and (self.floors is None) == (other.floors is None)

    def rule(self, most: int) -> LengthRule | None:
        """Return where chains of at most `most` tokens end, None for chains of one length."""
        value = self.confidence_threshold
        floors = self.floors if value is None else (value,) * most
        return None if floors is None else LengthRule(tuple(floors))

    def load(self) -> StaticTree | DynamicTree | None:
        """Return the tree, None for a chain. Raises UserError for an unknown name and a file that holds no tree."""
        if self.tree not in GROWING:
            return load_tree(self.tree)
        return DynamicTree(self.depth or 6, self.branching or 8, self.total_tokens or 60, self.tree)

    def __post_init__(self) -> None:
        check_fields(self, "evaluate.drafts: ")
        where, chain, dynamic = f"evaluate.drafts, tree {self.tree}:", self.tree == "chain", self.tree in GROWING
        for key in ("epsilon", "delta"):
            fits = self.acceptance == "typical" or getattr(self, key) == getattr(type(self), key)
            require(fits, f"{where} {key}", getattr(self, key), "only acceptance: typical takes it")
        for key in ("depth", "branching", "total_tokens"):
            value = getattr(self, key)
            require(dynamic or value is None, f"{where} {key}", value, f"only a tree of {', '.join(GROWING)} takes it")
        grown, value = self.tree in GROWING and self.tree != "dynamic", self.budgets
        require(grown or value is None, f"{where} budgets", value, "only a tree of best_first, accum_logp takes them")
        value = self.confidence_threshold
        require(chain or value is None, f"{where} confidence_threshold", value, "only a chain takes it")
        one = chain and value is None and self.floors != []
        require(
            one or self.floors is None,
            f"{where} floors",
            self.floors,
            "a chain without confidence_threshold takes one or more",
        )
        static = self.children is None or not (chain or dynamic)
        require(static, f"{where} children", self.children, "only a static tree takes it")


@dataclass(frozen=True)
class FilterSpec:
    """Which tokens may be sampled, and how likely they are."""

    top_k: int = field(default=0, metadata=within(0, 2**24))
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = field(default=1.0, metadata=within(0, 1, above=True))
    """Keep the most likely tokens up to this mass."""
    min_p: float = field(default=0.0, metadata=LATER | SHARE)
    """Keep tokens at least this many times as likely as the most likely one; 0 keeps all."""
    repetition_penalty: float = field(default=1.0, metadata=LATER | within(0, 100, above=True))
    """Above 1 makes tokens that the prompt or the answer holds already less likely; 1 changes nothing."""

    def at(self, section: str, temperature: float) -> Sampling:
        """Return how tokens are chosen at a temperature. Raises UserError that names the key of the section."""
        try:
            return Sampling(temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)
        except UserError as error:
            raise UserError(f"{section}.{error}") from error


@dataclass(frozen=True)
class EvaluateSpec(FilterSpec):
    """Measuring a head."""

    prompts: list[str] = field(default_factory=list)
    """Prompt sets (JSONL with id, slice, messages); empty takes those that come with the target `embedded`."""
    split: str = field(default="train", metadata=LATER)
    """Which split of the Hub data sets in `prompts` is read."""
    per_slice: int | None = field(default=None, metadata=within(1, 10**6))
    """Prompts per slice; None takes all."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0], metadata=TEMPERATURE)
    """One result.json per temperature."""
    num_speculative_tokens: int = field(default=5, metadata=_CHAIN)
    """Length of the drafted chain; a head with a shorter maximum drafts that many, a tree has its own depth."""
    max_k: int = field(default=8, metadata=_CHAIN)
    """Largest chain length in the sweep."""
    drafts: list[DraftSpec] = field(default_factory=lambda: [DraftSpec()])
    """Ways to draft, each measured in the same run with every head that can draft so."""
    beside: dict[str, str] = field(default_factory=dict)
    """Heads to measure in the same run, by a name of your choice: the folder of a trained head."""
    baselines: list[BaselineSpec] = field(default_factory=list)
    """Drafters without a head to measure in the same run, such as {kind: prompt_lookup}."""
    max_new_tokens: int = field(default=256, metadata=TOKENS)
    """Most tokens per answer."""
    max_new_tokens_by_slice: dict[str, int] = field(default_factory=dict, metadata=TOKENS)
    """Other limits for some slices."""
    batch: int = field(default=1, metadata=BATCH)
    """Prompts decoded together."""
    dtype: Dtype = "auto"
    """Dtype for decoding; `auto` is the target's."""
    repeats: int = field(default=3, metadata=within(1, 1000))
    """Timed repeats, interleaved between target and drafters."""
    generate: bool = True
    """Time transformers' generate as well as our own baseline, where requests are decoded one at a time (batch 1)."""
    lossless: bool = True
    """Decode every prompt greedily in fp32 with and without the head and compare the ids."""
    original: bool = field(default=True, metadata=LATER)
    """Compare a target that was tuned with its heads and exported (Medusa-2) with the original, which is loaded too."""
    plan_batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64], metadata=BATCH)
    """Batches to plan for: target passes and drafts are timed at each that fits in memory; empty makes no plan."""
    plan_contexts: list[int] = field(default_factory=list, metadata=TOKENS)
    """Contexts to plan for, in tokens; empty takes the shortest prompt, the middle of a typical answer, and the longest text."""
    thinking: list[str] = field(default_factory=lambda: ["<think>", "</think>"], metadata=LATER)
    """What opens and what closes thought in an answer's text, to tell acceptance in it from that in the answer proper."""
    price_per_hour: float | None = field(default=None, metadata=within(0, 10**6, above=True))
    """Price of the machine, in any currency, for the cost of a million tokens with and without speculation."""
    example_slices: list[str] = field(default_factory=list)
    """Slices that worked examples come from; empty takes all."""

    @property
    def longest_chain(self) -> int:
        """The most tokens that a chain of the evaluation drafts."""
        return max([self.max_k, *(len(draft.floors) for draft in self.drafts if draft.floors)])

    def sampling(self, temperature: float) -> Sampling:
        """How tokens are chosen at one of the temperatures."""
        return self.at("evaluate", temperature)

    def __post_init__(self) -> None:
        check_fields(self, "evaluate.")
        key, value = "evaluate.num_speculative_tokens", self.num_speculative_tokens
        require(1 <= value <= self.max_k, key, value, f"it must be from 1 to evaluate.max_k ({self.max_k})")
        require(bool(self.temperatures), "evaluate.temperatures", self.temperatures, "name at least one")
        twice = len(set(self.temperatures)) < len(self.temperatures)
        require(not twice, "evaluate.temperatures", self.temperatures, "the same one is named twice")
        for temperature in self.temperatures:
            self.sampling(temperature)
        two = len(self.thinking) == 2 and all(self.thinking)
        require(two, "evaluate.thinking", self.thinking, "it takes two texts, what opens thought and what closes it")
        require(bool(self.drafts), "evaluate.drafts", self.drafts, "name at least one, such as {tree: chain}")
        twice = any(one.is_named_by(other) for one, other in combinations(self.drafts, 2))
        why = "the same way to draft is named twice (thresholds of typical acceptance apart)"
        require(not twice, "evaluate.drafts", [draft.tree for draft in self.drafts], why)
        kinds = [baseline.kind for baseline in self.baselines]
        require(len(set(self.baselines)) == len(kinds), "evaluate.baselines", kinds, "the same one is named twice")
