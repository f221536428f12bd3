"""Name the first thing in which an engine differs from a parity bundle, and what usually causes it.

First come the target's answers, then drafted tokens, then counts. What each fault would give stands in the bundle: those that give exactly
what was seen are named, as a set where several do. Where none does, what is left are causes that cannot be foretold. A difference between
two tokens whose logits are closer than the bundle's budget is rounding, and no fault.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from draftsmith.eval.engines.agreement import EngineAnswer, EngineRound, within_text
from draftsmith.eval.engines.llama_cpp import UNSEEN, counted_by_llama_cpp
from draftsmith.eval.parity.bundle import Bundle, ParityPrompt
from draftsmith.eval.parity.faults import COUNTS, FAULTS

ANSWERS, DRAFTS = "the target's answers", "drafted tokens"
RIGHT, BONUS, SILENT, TEMPLATE, ENDS = "right", "bonus counted", "no drafts", "template", "end of text"
QUANTIZED, OTHER_MODEL, OTHER_K = "quantized target", "another model", "another K"
WEIGHTS, STATES = "embedding or weights", "precision of states"
CAUSES = {fault.name: fault.cause for fault in FAULTS} | {
    BONUS: "the bonus token is counted among the accepted ones",
    OTHER_K: "the server is started with another number of tokens (num_speculative_tokens) than the export says",
    SILENT: "the engine does not speculate: a flag is missing, or the draft was not loaded",
    TEMPLATE: "another chat template (or system prompt) makes other prompts of the same messages",
    ENDS: "other tokens end an answer (eos_token_id of the generation config, or a limit of the server)",
    QUANTIZED: "the target is served in another precision (dtype, quantization)",
    OTHER_MODEL: "another target is served: other weights, or an adapter",
    WEIGHTS: "an embedding that is not the target's, or other weights of the head than the export's",
    STATES: "states or weights in another precision (a quantized target or head)",
}
_MOST = 0.8
"""The share of prompts on which a foretold fault must give exactly what was seen."""
_LOST = 0.25
"""Where fewer of the bundle's tokens are accepted than this share, other weights of the head may be the cause."""


@dataclass(frozen=True)
class Seen:
    """What an engine gave for a prompt.

    output_ids: the answer, its end token included. rounds: UNSEEN for a drafted token that is not told; None where rounds are not told.
    drafted, accepted: of all rounds, where these are not told; None: not told either. prompt_ids, prompt_tokens: what the engine made of
    the messages, and how long that was; None where it was not asked.
    """

    id: str
    output_ids: tuple[int, ...]
    rounds: tuple[EngineRound, ...] | None = None
    drafted: int | None = None
    accepted: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None

    @property
    def names_drafts(self) -> bool:
        """Whether the drafted tokens are told."""
        return self.rounds is not None and all(UNSEEN not in r.drafted for r in self.rounds)

    def rendered_otherwise(self, prompt: ParityPrompt) -> str | None:
        """Return how what the engine made of the messages differs from the prompt, None where it does not or is not told."""
        tokens = len(self.prompt_ids) if self.prompt_ids is not None else self.prompt_tokens
        if tokens is None or (tokens == len(prompt.prompt_ids) and self.prompt_ids in (None, prompt.prompt_ids)):
            return None
        others = ", and others" if tokens == len(prompt.prompt_ids) else ""
        return f"{prompt.id}: its messages become {tokens} tokens, here {len(prompt.prompt_ids)}{others}"


@dataclass(frozen=True)
class Verdict:
    """stage: where the first difference is; empty where nothing differs. difference: what it is, in words. causes: names of what usually
    causes it, the likeliest first. ties: differences that rounding explains."""

    stage: str = ""
    difference: str = ""
    causes: tuple[str, ...] = ()
    ties: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """Whether nothing differs but ties."""
        return not self.stage

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        if self.right:
            ties = f", but for {len(self.ties)} near ties" if self.ties else ""
            return f"right: answers and drafts are those of the bundle{ties}"
        usual = "; or ".join(CAUSES[name] for name in self.causes)
        return f"wrong in {self.stage}: {self.difference}. Usually {usual}."


_Rule = Callable[[EngineAnswer, ParityPrompt, Collection[int]], EngineAnswer]
_RULES: tuple[_Rule, ...] = (
    lambda answer, prompt, ends: answer,
    lambda answer, prompt, ends: within_text(answer),
    lambda answer, prompt, ends: counted_by_llama_cpp(answer, prompt.max_new_tokens, ends),
    lambda answer, prompt, ends: _within_limit(answer, prompt.max_new_tokens),
)
"""How engines count where an answer ends: on past it, up to it, as llama.cpp, and as our decoder."""


def _within_limit(answer: EngineAnswer, limit: int) -> EngineAnswer:
    """Return the answer with drafts no longer than it may become, and what is accepted up to its end."""
    known, rounds = 1, []
    for r in answer.rounds:
        kept = min(r.accepted, len(answer.output_ids) - known)
        rounds.append(EngineRound(r.drafted[: limit - known], kept))
        known += r.accepted + 1
    return replace(answer, rounds=tuple(rounds))


def diagnose(bundle: Bundle, seen: Sequence[Seen], end_ids: Collection[int] = ()) -> Verdict:
    """Compare what an engine gave for the prompts of a bundle, in their order. end_ids: that end an answer in this engine, the bundle's if
    none are named."""
    assert [prompt.id for prompt in bundle.prompts] == [one.id for one in seen]
    pairs = list(zip(bundle.prompts, seen, strict=True))
    if (wrong := _template(pairs)) is not None:
        return wrong
    answers, ties, usable = _answers(bundle, pairs)
    if answers is not None:
        return replace(answers, ties=ties)
    if not usable:
        return Verdict(ANSWERS, "every answer leaves the bundle's at a near tie", (QUANTIZED,), ties)
    if not any((one.rounds and any(r.drafted for r in one.rounds)) or one.drafted or one.accepted for _, one in usable):
        return Verdict(DRAFTS, "nothing was drafted", (SILENT,), ties)
    return _drafts(bundle, usable, end_ids or bundle.eos_ids, ties)


_Pairs = Sequence[tuple[ParityPrompt, Seen]]


def _template(pairs: _Pairs) -> Verdict | None:
    differs = (one.rendered_otherwise(prompt) for prompt, one in pairs)
    return next((Verdict(ANSWERS, what, (TEMPLATE,)) for what in differs if what is not None), None)


def _answers(bundle: Bundle, pairs: _Pairs) -> tuple[Verdict | None, tuple[str, ...], _Pairs]:
    """Return what is wrong with the answers, near ties, and the prompts whose answers are the bundle's."""
    ties, usable, ended, other = [], [], [], []
    for prompt, one in pairs:
        ours, theirs = prompt.answer_ids, one.output_ids
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if place is None and len(ours) == len(theirs):
            usable.append((prompt, one))
        elif place is None:
            ended.append(f"{prompt.id}: the answer has {len(theirs)} tokens, in the bundle {len(ours)}")
        else:
            margin = prompt.margins[place]
            what = f"{prompt.id}: token {place} is {theirs[place]}, in the bundle {ours[place]}, whose logit is {margin:.2g} above the next"
            if margin <= bundle.budget:
                ties.append(what)
            else:
                other.append((what, theirs[place] in [token for token, _ in prompt.target_top[place]]))
    if other:
        near = sum(likely for _, likely in other) * 2 >= len(other)
        causes = (QUANTIZED, OTHER_MODEL) if near else (OTHER_MODEL,)
        return Verdict(ANSWERS, other[0][0], causes), tuple(ties), usable
    if ended:
        return Verdict(ANSWERS, ended[0], (ENDS,)), tuple(ties), usable
    return None, tuple(ties), usable


def not_told(bundle: Bundle, seen: Sequence[Seen], end_ids: Collection[int] = ()) -> tuple[str, ...]:
    """Return the faults that a right engine could have without anything of what it tells being different on these prompts."""
    ends = end_ids or bundle.eos_ids

    def alike(p: ParityPrompt, s: Seen, own: Sequence[Sequence[int]]) -> bool:
        return any(_same(rule(p.answer(own), p, ends), s, rule) for rule in _RULES)

    # What left the bundle at a near tie tells nothing either way.
    pairs = list(zip(bundle.prompts, seen, strict=True))
    usable = [(place, *pair) for place, pair in enumerate(pairs) if alike(*pair, pair[0].rounds)]
    found = [name for name, own in bundle.faults.items() if all(alike(p, s, own[place]) for place, p, s in usable)]
    return (*found, *bundle.unseen)


def _drafts(bundle: Bundle, pairs: _Pairs, ends: Collection[int], ties: tuple[str, ...]) -> Verdict:
    """Compare drafts and counts of prompts whose answers are right, with the bundle's and with those of every fault."""
    number = {prompt.id: place for place, prompt in enumerate(bundle.prompts)}

    def given(name: str, prompt: ParityPrompt, rule: _Rule) -> EngineAnswer:
        """What a right engine gives, or one with a fault, as it counts."""
        own = bundle.faults[name][number[prompt.id]] if name in bundle.faults else prompt.rounds
        answer = rule(prompt.answer(own), prompt, ends)
        counted = tuple(EngineRound(r.drafted, r.accepted + (name == BONUS)) for r in answer.rounds)
        return replace(answer, rounds=counted)

    def matches(name: str) -> tuple[_Pairs, _Rule]:
        """Return the prompts that are not as `name` gives them, under the rule of counting by which they are fewest."""
        missed = [([(p, s) for p, s in pairs if not _same(given(name, p, rule), s, rule)], rule) for rule in _RULES]
        return min(missed, key=lambda found: len(found[0]))

    missed, rule = matches(RIGHT)
    differ: list[tuple[tuple[int, int], str]] = []
    near = list[tuple[tuple[int, int], str]]()
    for prompt, one in missed:
        place, what, margin = _first(rule(prompt.answer(), prompt, ends), prompt, one)
        # Where tokens are not told, a near tie anywhere may be the reason; on most prompts it is not.
        excused = margin <= bundle.budget and (one.names_drafts or len(missed) * 2 <= len(pairs))
        (near if excused else differ).append((place, what))
    left = {name: len(matches(name)[0]) for name in (BONUS, *bundle.faults)} if missed else {}
    fewest = min(left.values(), default=len(missed))
    if (
        not differ and len(near) > 1 and not fewest
    ):  # several near ties do not happen to be what a fault gives everywhere
        differ, near = near, []
    ties = (*ties, *(what for _, what in near))
    if not differ:
        return Verdict(ties=ties)
    named = [name for name in left if left[name] == fewest and len(pairs) - fewest >= _MOST * len(pairs)]
    causes = tuple(named) if fewest < len(missed) and named else _unforetold(bundle, pairs)
    # Weights that are not the head's are hardly ever accepted, and by counts look like any foretold fault that is not either.
    if WEIGHTS not in causes and not all(one.names_drafts for _, one in pairs) and _kept(pairs) < _LOST:
        causes = (*causes, WEIGHTS)
    (_, token), difference = differ[0]
    stage = "counts alone" if token < 0 else "the first drafted token" if token == 0 else "later drafted tokens"
    return Verdict(stage if causes != (BONUS,) else COUNTS, difference, causes, ties)


def _same(ours: EngineAnswer, seen: Seen, rule: _Rule) -> bool:
    """Whether what was seen of an answer's rounds is this."""
    if seen.rounds is None:
        drafted = ours.drafted if seen.drafted is None else seen.drafted
        return (drafted, seen.accepted) == (ours.drafted, ours.accepted)
    theirs = EngineAnswer(seen.id, seen.output_ids, seen.rounds)
    if rule is _RULES[1]:
        theirs = within_text(theirs)
    if seen.names_drafts:
        return ours.rounds == theirs.rounds
    mine, other = ([(len(r.drafted), r.accepted) for r in one.rounds] for one in (ours, theirs))
    return mine == other


def _first(ours: EngineAnswer, prompt: ParityPrompt, seen: Seen) -> tuple[tuple[int, int], str, float]:
    """Return round and drafted token of the first difference (token -1: in counts), what it is, and the margin that rounding must bridge."""
    everywhere = min((margin for margins in prompt.draft_margins for margin in margins), default=1.0)
    if seen.rounds is None:
        what = f"{prompt.id}: {seen.accepted} tokens accepted of {seen.drafted}, in the bundle {ours.accepted} of {ours.drafted}"
        return (0, -1), what, everywhere
    for place, (a, b) in enumerate(zip(ours.rounds, seen.rounds, strict=False)):
        where = f"{prompt.id}, round {place}"
        if seen.names_drafts:
            for k, (x, y) in enumerate(zip(a.drafted, b.drafted, strict=False)):
                if x != y:
                    margins = prompt.draft_margins[place] if place < len(prompt.draft_margins) else ()
                    margin = margins[k] if k < len(margins) else 1.0
                    return (place, k), f"{where}: drafted token {k} is {y}, in the bundle {x}", margin
        if (len(a.drafted), a.accepted) != (len(b.drafted), b.accepted):
            what = f"{where}: {b.accepted} accepted of {len(b.drafted)}, in the bundle {a.accepted} of {len(a.drafted)}"
            token = -1 if a.drafted[: len(b.drafted)] == b.drafted[: len(a.drafted)] or not seen.names_drafts else 0
            margin = 1.0 if seen.names_drafts else min(prompt.draft_margins[place], default=1.0)
            return (place, token if len(a.drafted) == len(b.drafted) else len(a.drafted)), what, margin
    return (0, -1), f"{prompt.id}: {len(seen.rounds)} rounds, in the bundle {len(ours.rounds)}", everywhere


def _kept(pairs: _Pairs) -> float:
    """Return how many tokens were accepted for each one that is in the bundle."""
    ours = sum(accepted for prompt, _ in pairs for accepted, *_ in prompt.rounds)
    theirs = sum(sum(r.accepted for r in one.rounds) if one.rounds else one.accepted or 0 for _, one in pairs)
    return theirs / max(ours, 1)


def _unforetold(bundle: Bundle, pairs: _Pairs) -> tuple[str, ...]:
    """Return the causes that nobody can foretell, by how much of the drafts they leave as they were."""
    longest = {len(r.drafted) for _, one in pairs for r in (one.rounds or ())[:1]}
    if longest and bundle.num_speculative_tokens not in longest:
        return (OTHER_K,)
    if all(one.names_drafts for _, one in pairs):
        first = [one.rounds[0].drafted[:1] == tuple(prompt.rounds[0][1:2]) for prompt, one in pairs if one.rounds]
        kept = sum(first) / len(first)
    else:
        kept = _kept(pairs)
    return (STATES, WEIGHTS) if 0.75 <= kept <= 1 / 0.75 else (WEIGHTS, STATES)
