"""result.json: every number of one evaluation at one sampling setting, with one meaning each.

Written by the evaluation, read by the report, the gate and the comparison. `None` (null in the file) means "not
measured" and is never replaced by a guess. All shares are between 0 and 1, all times are wall clock. The accepted
length tau counts the bonus token (as EAGLE and Spec-Bench do), so the target alone has tau = 1.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.eval.drafters.system import DraftInfo
from draftsmith.eval.results.conditions import Group, explain_past
from draftsmith.eval.results.intervals import Percentiles as Percentiles
from draftsmith.eval.results.served import Served
from draftsmith.foreign.records import read_current
from draftsmith.foreign.text import read_json
from draftsmith.machine import Clocks
from draftsmith.machine import Hardware as Hardware
from draftsmith.storage import write_json

OVERALL = "overall"
"""The name of all slices together, which no slice may have."""
WARNING = "warning"
"""How the names of those facts begin that make a result doubtful: shown at the top of the report too."""

_MOST = 1e15  # more than any count, time or number of bytes that is measured
_BELOW_ZERO = 1e-12  # so much below zero a sum of shares may come by rounding


@dataclass(frozen=True)
class MsPerRound:
    """Mean milliseconds of one decode round, by part; the four add up to the round.

    draft: proposing, with the drafter's own prefill spread over the rounds. verify: the target's pass. commit: accepting
    and committing. other: everything else between two rounds.
    """

    draft: float | None = None
    verify: float | None = None
    commit: float | None = None
    other: float | None = None


@dataclass(frozen=True)
class SweepPoint:
    """One draft length K = num_speculative_tokens of the sweep.

    tau_simulated, acceptance_rate: exact, from one teacher-forced pass; the rate is null where that does not tell how many
    tokens are drafted. predicted_speedup: see `Costs.speedup`.
    """

    num_speculative_tokens: int
    tau_simulated: float | None = None
    acceptance_rate: float | None = None
    predicted_speedup: float | None = None


@dataclass(frozen=True)
class Divergence:
    """The first place where a speculated greedy text differs from the target alone.

    prompt: the prompt's id. position: emitted tokens before it. expected, got: token ids of the target alone and of the speculated text.
    logit_gap: the target's logit of `expected` minus that of `got`, in the dtype checked; rounding explains it only when tiny.
    """

    prompt: str
    slice: str
    position: int
    expected: int
    got: int
    logit_gap: float | None = None


@dataclass(frozen=True)
class Lossless:
    """Greedy equality, token for token, with the target alone. checked: prompts compared. equal: prompts whose texts are the same ids.
    tau, tau_simulated: of the checked greedy texts."""

    dtype: str
    checked: int
    equal: int
    first_divergences: tuple[Divergence, ...] = ()
    tau: float | None = None
    tau_simulated: float | None = None


@dataclass(frozen=True)
class Measures:
    """What was measured for one drafter on one slice, or over all slices (sums, never means of ratios)."""

    #: Prompts evaluated.
    prompts: int
    #: Tokens emitted in the decode phase: after the first token of each answer, up to and with EOS.
    tokens: int | None = None
    #: Target verification passes in the decode phase.
    rounds: int | None = None
    #: Accepted length as decoded: tokens / rounds, bonus included; the target alone has 1.
    tau: float | None = None
    #: The mean of the prompts' own ratios, all answers to a prompt together, each prompt weighing the same.
    tau_mean_over_prompts: float | None = None
    #: 95% bootstrap interval of tau over prompts; none below 10 prompts.
    tau_interval: tuple[float, float] | None = None
    #: Accepted length, exact, from one teacher-forced pass over the target's answers.
    tau_simulated: float | None = None
    #: 95% bootstrap interval of tau_simulated over prompts.
    tau_simulated_interval: tuple[float, float] | None = None
    #: Standard error of tau - tau_simulated: the sampling error of acceptance on the same texts (0 when greedy).
    tau_difference_se: float | None = None
    #: Accepted / drafted tokens.
    acceptance_rate: float | None = None
    #: [K] P(draft position i accepted), over all rounds.
    acceptance_at: tuple[float | None, ...] | None = None
    #: [K] P(draft position i accepted, given that all before it were); null where no round came that far.
    alpha_at: tuple[float | None, ...] | None = None
    #: The same two by simulation.
    acceptance_at_simulated: tuple[float | None, ...] | None = None
    alpha_at_simulated: tuple[float | None, ...] | None = None
    #: Acceptance by the tokens that stood before the draft, prompt and answer; up to and past the length that the head was trained to
    #: (null where that is not known); in thought and after it (null where no answer thinks).
    contexts: tuple[Group, ...] | None = None
    training_split: tuple[Group, ...] | None = None
    thinking: tuple[Group, ...] | None = None
    #: Draft lengths, ascending.
    k_sweep: tuple[SweepPoint, ...] | None = None
    #: tau_simulated of a tree that grows by its total_tokens, ascending.
    budget_sweep: dict[str, float | None] | None = None
    #: Emitted tokens after the first per second of decoding with this drafter, median over repeats.
    decode_tok_s: float | None = None
    #: [min, max] over repeats.
    decode_tok_s_spread: tuple[float, float] | None = None
    #: The same for the target alone: same engine, prompts, stop rule and counter, interleaved.
    baseline_tok_s: float | None = None
    baseline_tok_s_spread: tuple[float, float] | None = None
    #: decode_tok_s / baseline_tok_s, median over repeats.
    speedup: float | None = None
    speedup_spread: tuple[float, float] | None = None
    #: Tokens per second over those of transformers' `generate`, both on the prompts that it was timed on.
    speedup_vs_generate: float | None = None
    #: The same for the target alone, on generate's prompts too.
    baseline_vs_generate: float | None = None
    #: Seconds from the request's start to its first token (prefill only), median over requests.
    ttft_s: float | None = None
    #: The same for the target alone.
    ttft_baseline_s: float | None = None
    #: Seconds per request, start to last token, and the same for the target alone.
    latency_s: Percentiles | None = None
    latency_baseline_s: Percentiles | None = None
    #: Seconds that a reader of the stream waits for each token after the first, and the same for the target alone; a round's
    #: tokens come together, so all but its first take 0.
    token_wait_s: Percentiles | None = None
    token_wait_baseline_s: Percentiles | None = None
    ms_per_round: MsPerRound | None = None
    #: tau / (verify(K + 1)/verify(1) + draft(K)/verify(1)): see `Costs.speedup`.
    ideal_speedup: float | None = None
    #: Greedy equality in float32, and in the dtype of the timed run (where rounding may tip near ties).
    lossless: Lossless | None = None
    lossless_timed: Lossless | None = None
    #: Share of answers that hold a 6-gram 4 times.
    looping: float | None = None
    #: Perplexity of the drafter's texts under the target at temperature 1, and of the target's own texts at the same
    #: sampling setting; only for lossy drafters and for those that change the target.
    perplexity: float | None = None
    perplexity_baseline: float | None = None
    #: Where the target was tuned with the drafter (Medusa-2), on the original target's own texts: share of tokens where
    #: both targets' likeliest choice is the same, and the mean of KL(original || tuned) per token in nats, at temperature 1.
    agreement: float | None = None
    kl: float | None = None
    #: Lossy or changed alike: shares of right answers, of the drafter and of the target alone, among answers with a reference.
    exact_match: float | None = None
    exact_match_baseline: float | None = None
    referenced: int | None = None
    #: The same for valid JSON, among the answers of slices with the word json in their name.
    valid_json: float | None = None
    valid_json_baseline: float | None = None
    json_answers: int | None = None
    #: Largest GPU memory in use while decoding, weights included, and the same for the target alone.
    peak_memory_bytes: int | None = None
    peak_memory_baseline_bytes: int | None = None


@dataclass(frozen=True)
class PromptSums:
    """What all answers to one prompt add to tau, which is tokens / rounds: tokens after the first, target passes, and the passes
    that the simulation expects at the decoded draft length; null where nothing was decoded, or simulated."""

    slice: str
    tokens: float
    rounds: float | None
    rounds_simulated: float | None


@dataclass(frozen=True)
class DrafterResult:
    """One drafter's measures over everything and per slice. draft: how it drafts. prompts: by id."""

    overall: Measures
    slices: dict[str, Measures]
    draft: DraftInfo | None = None
    prompts: dict[str, PromptSums] = field(default_factory=dict)

    def at(self, slice_name: str) -> Measures | None:
        """Return the measures of a slice, or of all (OVERALL); None where there are none."""
        return self.overall if slice_name == OVERALL else self.slices.get(slice_name)


@dataclass(frozen=True)
class Costs:
    """Measured milliseconds of single steps, by size; the sizes are text keys, as JSON has no others.

    verify_ms: {"n": one target pass over n new tokens}; "1" is the target alone and K drafted tokens need n = K + 1. draft_ms:
    {"<drafter>": {"k": proposing k tokens}}; for a tree k is its depth. nodes: {"<drafter>": {"k": n of its target pass}} for trees.
    """

    verify_ms: dict[str, float]
    draft_ms: dict[str, dict[str, float]]
    nodes: dict[str, dict[str, int]] = field(default_factory=dict)

    def speedup(self, drafter: str, num_speculative_tokens: int, tau: float) -> float | None:
        """Return tau / (verify(n)/verify(1) + draft(K)/verify(1)), n = K + 1 for a chain; None where a cost is missing."""
        alone = self.verify_ms.get("1")
        nodes = self.nodes.get(drafter, {}).get(str(num_speculative_tokens), num_speculative_tokens + 1)
        verify = self.verify_ms.get(str(nodes))
        draft = self.draft_ms.get(drafter, {}).get(str(num_speculative_tokens))
        if alone is None or verify is None or draft is None or verify + draft <= 0:
            return None
        return tau * alone / (verify + draft)


@dataclass(frozen=True)
class Pick:
    """A draft that the plan chose, a neighbour of it, or the decoded one, timed in the same turns as everything else on some prompts.

    tau_simulated: on the same prompts. speedup: over the target alone on them, median over repeats; spread: [min, max] of these.
    """

    drafter: str
    num_speculative_tokens: int
    prompts: int
    tau_simulated: float | None
    speedup: float | None
    spread: tuple[float, float] | None


@dataclass(frozen=True)
class Piece:
    """A token of a worked example. position: that of an accepted draft from 0 on, null for the target's own."""

    text: str
    position: int | None


@dataclass(frozen=True)
class Example:
    """A generation to look at. prompt: as a person reads it; pieces: the answer, token by token."""

    drafter: str
    slice: str
    prompt: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Settings:
    """The sampling setting and how it was run.

    temperature 0 is greedy. top_k, top_p, min_p, repetition_penalty: null = off. num_speculative_tokens: K of the decoded run. batch:
    requests decoded together. dtype: of target and drafter. repeats: timed passes per system. prompts: identifies the prompts by ids,
    slices, messages and the most tokens of their answers. longest_text: the most tokens that a prompt and its answer may have together.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    num_speculative_tokens: int
    batch: int
    dtype: str
    seed: int
    repeats: int
    min_p: float | None = None
    repetition_penalty: float | None = None
    prompts: str | None = None
    longest_text: int | None = None

    @property
    def filters(self) -> dict[str, float | None]:
        """The filters of the target's distribution besides the temperature, by the name a report gives them."""
        cut = {"top-k": self.top_k, "top-p": self.top_p, "min-p": self.min_p}
        return {**cut, "repetition penalty": self.repetition_penalty}


@dataclass(frozen=True)
class TargetInfo:
    """The frozen target: path or Hub name, fingerprint of weights and config, its size. weight_bytes: of its weights as it ran;
    cache_bytes: of a token's keys and values, of all layers."""

    path: str
    fingerprint: str | None = None
    parameters: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    weight_bytes: int | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True)
class Result:
    """One evaluation at one sampling setting: the whole result.json.

    command: as typed. commit: of the working directory, "-dirty" if modified, null outside git. date: UTC, ISO 8601.
    recipe: as a plain object. drafters: in the order of the report. supplement: further facts by name, shown at the end. served: of running
    servers; a result may be of these alone, without drafters.
    """

    command: str
    commit: str | None
    date: str
    hardware: Hardware
    versions: dict[str, str]
    recipe: dict[str, Any] | None
    target: TargetInfo
    settings: Settings
    drafters: dict[str, DrafterResult]
    costs: Costs | None = None
    picks: tuple[Pick, ...] = ()
    clocks: Clocks | None = None
    examples: tuple[Example, ...] = ()
    supplement: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    served: Served | None = None
    schema_version: int = 14

    @property
    def warnings(self) -> list[str]:
        """What makes the numbers doubtful, such as a head that was made for another target."""
        noted = [str(text) for name, text in self.supplement.items() if name.startswith(f"{WARNING} ")]
        return noted + self.past_training

    @property
    def past_training(self) -> list[str]:
        """Which heads drafted in longer texts than they learned from, and what tau does there, a sentence each."""
        sentences = []
        for name, drafter in self.drafters.items():
            trained = None if drafter.draft is None else drafter.draft.trained_length
            text = "" if trained is None else explain_past(trained, drafter.overall.training_split or ())
            sentences += [f"at temperature {self.settings.temperature:g} {name} drafted {text}."] if text else []
        return sentences


def to_json(result: Result) -> dict[str, Any]:
    """Return the plain JSON object, schema_version first; every field is present, null where not measured."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(result)))  # lists instead of tuples
    return {"schema_version": values.pop("schema_version"), **values}


def from_json(value: Any, source: str = "result.json") -> Result:
    """Check and build a Result; UserError names the wrong, unknown or missing key, and a version other than this one."""
    again = "give a result.json of an evaluation with this version, or evaluate again"
    if isinstance(value, dict) and value.get("schema_version") == 13:  # which had no servers
        value = {**value, "served": None, "schema_version": 14}
    result = read_current(Result, value, source, again)
    for name, drafter in result.drafters.items():
        if OVERALL in drafter.slices:
            raise UserError(
                f"{source}: 'drafters.{name}.slices' has a slice named {OVERALL}; that name is kept for the sum of all."
            )
        for place, measures in {OVERALL: drafter.overall, **drafter.slices}.items():
            check_figures(measures, f"{source}: 'drafters.{name}' says of {place} that")
    return result


def read_result(path: str | Path) -> Result:
    """Read and check a result.json."""
    return from_json(read_json(path, "give the path of a result.json that an evaluation wrote"), str(path))


def write_result(path: str | Path, result: Result) -> None:
    """Check `result` as a reader would and write it atomically."""
    value = to_json(result)
    from_json(value, str(path))
    write_json(Path(path), value)


def check_figures(measures: Measures, where: str) -> None:
    """Raise UserError for figures that nothing can have. where: what they are of, up to "says that"."""
    again = "evaluate again, or restore the file"
    for key, value in vars(measures).items():
        numbers = [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, int | float)]
        # Rounding may bring kl below zero, and by a little the difference of two equal shares.
        if key != "kl" and numbers and min(numbers) < -_BELOW_ZERO:
            raise UserError(f"{where} {key} is {min(numbers):g}, below zero: {again}.")
        if numbers and max(numbers) > _MOST:
            raise UserError(f"{where} {key} is {max(numbers):g}, more than can be measured: {again}.")
    taus = [measures.tau, measures.tau_simulated, *(point.tau_simulated for point in measures.k_sweep or ())]
    if any(tau is not None and tau <= 0 for tau in (*taus, *(measures.budget_sweep or {}).values())):
        raise UserError(f"{where} an accepted length is zero or less, where every pass brings a token: {again}.")
    if measures.tokens and not measures.prompts:
        raise UserError(f"{where} there are {measures.tokens} tokens of no prompts: {again}.")
