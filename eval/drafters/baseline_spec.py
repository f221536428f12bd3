"""Which drafters without a head a recipe names, and their options. It imports none of them: reading a recipe is quick."""

from dataclasses import dataclass, field
from typing import Any

from draftsmith.fields import LATER, check_fields, require, within

OPTIONS: dict[str, tuple[str, ...]] = {
    "prompt_lookup": ("max_ngram",),
    "suffix": ("tree", "alpha", "max_tree_depth", "min_token_prob", "outputs", "max_cached_requests"),
    "lookahead": ("W", "N", "G"),
    "draft_model": ("path",),
}
"""The kinds of baselines, and the fields of `BaselineSpec` that each takes, no other kind does."""


@dataclass(frozen=True)
class BaselineSpec:
    """A drafter that is not trained here."""

    kind: str = ""
    """prompt_lookup repeats what followed the last tokens when they occurred before; suffix takes what followed them most often,
    in earlier answers too; lookahead lets the target guess ahead in the pass that verifies; draft_model is a smaller model."""
    path: str | None = None
    """draft_model: folder or Hub name of a model with the target's tokenizer."""
    max_ngram: int | None = field(default=None, metadata=within(1, 64))
    """prompt_lookup: the most tokens that are looked up; null is 3."""
    W: int | None = field(default=None, metadata=LATER | within(1, 128))
    """lookahead: columns of the window of guesses; null is 15."""
    N: int | None = field(default=None, metadata=LATER | within(2, 32))
    """lookahead: tokens of an n-gram, so that at most N - 1 are accepted at once; null is 5."""
    G: int | None = field(default=None, metadata=LATER | within(1, 128))
    """lookahead: the most n-grams that are verified at once; null is 15."""
    tree: bool | None = field(default=None, metadata=LATER)
    """suffix: draft a tree of the likeliest continuations; null is false, a chain, as vLLM does."""
    alpha: float | None = field(default=None, metadata=LATER | within(0, 64, above=True))
    """suffix: drafted tokens for each token of the match, at most; null is 1. vLLM's suffix_decoding_max_spec_factor."""
    max_tree_depth: int | None = field(default=None, metadata=LATER | within(2, 1024))
    """suffix: the most tokens of a match and its draft together; null is 24. vLLM's suffix_decoding_max_tree_depth."""
    min_token_prob: float | None = field(default=None, metadata=LATER | within(0, 1, above=True))
    """suffix: the least probability, by counts, of a path that is drafted; null is 0.1. vLLM's suffix_decoding_min_token_prob."""
    outputs: str | None = field(default=None, metadata=LATER)
    """suffix: an answers.jsonl of draftsmith with earlier outputs, such as the run's own; null looks at a prompt's own text alone."""
    max_cached_requests: int | None = field(default=None, metadata=LATER | within(1, 10**6))
    """suffix: take the last so many answers of `outputs`; null is 10000. vLLM's suffix_decoding_max_cached_requests."""

    def __post_init__(self) -> None:
        check_fields(self, "evaluate.baselines: ")
        kinds = [*OPTIONS]
        known = self.kind in OPTIONS
        require(known, "evaluate.baselines: kind", self.kind, f"choose {', '.join(kinds[:-1])} or {kinds[-1]}")
        where = f"evaluate.baselines, {self.kind}"
        takers = {option: kind for kind, options in OPTIONS.items() for option in options}
        for option, kind in takers.items():
            value = getattr(self, option)
            require(kind == self.kind or value is None, f"{where}: {option}", value, f"only {kind} takes it")
        if self.kind == "draft_model":
            require(bool(self.path), f"{where}: path", self.path, "name the folder of the draft model")
        if self.outputs is None:
            value = self.max_cached_requests
            require(value is None, f"{where}: max_cached_requests", value, "it counts answers of `outputs`; name those")

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that are set, for names."""
        options = {option: getattr(self, option) for option in OPTIONS[self.kind]}
        return {option: value for option, value in options.items() if value is not None}
