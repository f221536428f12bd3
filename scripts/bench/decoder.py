"""Compare the decoder with other decoders in one run: `python -m scripts.bench.decoder --recipe R --output FOLDER`.

Measured are the target alone, every drafter of the recipe's `evaluate` section, and transformers' own decoding
(`generate`, prompt lookup, assisted generation where the recipe names a draft model), in turns. Greedy or sampled, at the first
of the recipe's temperatures. Writes bench.json and bench.md.

Its own options are listed by --help, with every key of a recipe.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from draftsmith.decoder.answers import Request, tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.drafters.known_acceptance import KnownAcceptance
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.clocks.costs import measure_costs
from draftsmith.eval.clocks.turns import Repeats, run_systems
from draftsmith.eval.drafters.baselines import GenerateSystem, assisted, looked_up, plain
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.eval.measure.measure import ms_per_round, tok_s
from draftsmith.eval.results.result import MsPerRound
from draftsmith.machine import environment_json
from draftsmith.recipe.options import Option, number, require_recipe, take_options, whole_number
from draftsmith.recipe.parse import parse_recipe
from draftsmith.stages.drafters import at_temperature
from draftsmith.stages.evaluation import drafters_of, prompts_of
from draftsmith.stages.session import Session
from draftsmith.storage import write_json, write_text
from draftsmith.target.target import Target
from scripts.bench.pages import markdown_table

ALONE = "target alone"

_COUNT = whole_number("a whole number of at least 1")
_CHANCE = number("a probability from 0 to 1", lambda value: 0 <= value <= 1)
_KNOWN = "Also drafts of which each token is right with probability A, at temperature 0."
_SPEEDS = ("batch", "system", "tok/s", "spread", "speedup", "spread", "tau", "of the ideal", "equal texts")
_ROUNDS = ("draft", "verify", "commit", "other", "round")
OPTIONS = (
    Option("--output FOLDER", "Where bench.json and bench.md go.", Path, Path("bench")),
    Option("--batch N ...", "Rows decoded at once; repeatable.", _COUNT),
    Option("--prompts N", "Prompts per slice.", _COUNT),
    Option("--head FOLDER", "This head instead of the run's best.", Path),
    Option("--known-acceptance A ...", _KNOWN, _CHANCE),
)


@dataclass(frozen=True)
class SystemSpeed:
    """A system at one batch size. Speeds are medians over the repeats with their smallest and largest; speedup is paired
    with the target alone of the same repeat. ideal: at batch 1, tau over the separately timed passes of a round. equal:
    greedy texts that are those of the target alone."""

    system: str
    batch: int
    tok_s: float
    tok_s_spread: tuple[float, float]
    speedup: float
    speedup_spread: tuple[float, float]
    tau: float | None
    ideal_tok_s: float | None
    share_of_ideal: float | None
    equal: int | None
    texts: int
    ms_per_round: MsPerRound | None


def main(argv: list[str] | None = None) -> int:
    """Measure and write; a user's mistake is one sentence and exit code 2."""
    try:
        own, words = take_options(sys.argv[1:] if argv is None else argv, OPTIONS)
        require_recipe(words, "bench_decoding")
        words += [] if own.prompts is None else [f"--evaluate.per_slice={own.prompts}"]
        recipe = parse_recipe(words, "python -m scripts.bench.decoder", __doc__ or "", OPTIONS)
        rows, facts = bench(Session(recipe, head=own.head), own.batch or [1], own.known_acceptance)
        text = render(rows, facts)
        write_json(own.output / "bench.json", {**facts, "rows": [asdict(row) for row in rows]})
        write_text(own.output / "bench.md", text)
    except UserError as error:
        print(f"bench_decoding: {error}", file=sys.stderr)
        return 2
    Console().print(Markdown(text))
    return 0


def bench(
    session: Session, batches: Sequence[int], alphas: Sequence[float] = ()
) -> tuple[list[SystemSpeed], dict[str, Any]]:
    """Measure every system at every batch size, transformers' own at batch 1 alone."""
    spec = session.recipe.evaluate
    target = session.target_in(spec.dtype)
    prompts = prompts_of(session, target)
    requests = list(prompts.requests)
    sampling = spec.sampling(spec.temperatures[0])
    drafters = at_temperature(drafters_of(session, target, prompts), sampling)
    drafters += _known(target, requests, sampling, alphas, spec.num_speculative_tokens)
    costs = _ideal_costs(target, drafters, requests, sampling) if 1 in batches else {}
    # Of one slice, so that a batch is filled with prompts of all.
    repeats = [[replace(request, slice="") for request in requests]] * spec.repeats
    rows = []
    for batch in batches:
        theirs = _transformers(target, drafters) if batch == 1 else []
        found = run_systems(target, [*drafters, *theirs], repeats, sampling, batch=batch).by_name
        rows += _rows({ALONE: found.pop("")} | found, batch, drafters, costs, greedy=sampling.greedy)
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        **environment_json(),
        "target": {"path": target.path, "fingerprint": target.fingerprint, "dtype": target.dtype_name},
        "prompts": len(requests),
        "repeats": spec.repeats,
        "sampling": asdict(sampling),
    }
    return rows, facts


def _known(
    target: Target, requests: Sequence[Request], sampling: Sampling, alphas: Sequence[float], k: int
) -> list[SystemUnderTest]:
    """Return drafters of known acceptance, which know the answers beforehand."""
    if not alphas:
        return []
    if not sampling.greedy:
        raise UserError("--known-acceptance needs temperature 0: above it there is no one answer to know.")
    alone = decode_batch(target, TargetAlone(), requests, sampling, rows=8).generations
    answers = {g.request.prompt_ids: g.output_ids for g in alone}
    made = {alpha: partial(KnownAcceptance, answers, alpha, vocab_size=target.vocab_size) for alpha in alphas}
    return [
        SystemUnderTest(f"known acceptance {alpha:g}", "known_acceptance", make, k, k, fixed_length=False)
        for alpha, make in made.items()
    ]


def _transformers(target: Target, drafters: Sequence[SystemUnderTest]) -> list[GenerateSystem]:
    systems = [plain(target)]
    for c in drafters:
        drafter = c.make(c.num_speculative_tokens)
        if c.method == "prompt_lookup":
            systems.append(looked_up(target, c.num_speculative_tokens))
        if isinstance(model := getattr(drafter, "model", None), Target):
            systems.append(assisted(target, model, c.num_speculative_tokens))
            systems.append(assisted(target, model, c.num_speculative_tokens, confidence=0.4))
    return systems


def _ideal_costs(
    target: Target, drafters: Sequence[SystemUnderTest], requests: Sequence[Request], sampling: Sampling
) -> dict[str, float]:
    """Time the target pass and the draft of a single prompt's round apart; return their sum in ms, by system."""
    middle = sorted(requests, key=lambda r: len(r.prompt_ids))[len(requests) // 2]
    ids = list(middle.prompt_ids)
    context = (ids * (1 + middle.max_new_tokens))[: len(ids) + middle.max_new_tokens // 2]
    lengths = [replace(c, simulate=None) for c in drafters if c.method != "known_acceptance"]
    costs = measure_costs(target, lengths, context, sampling)
    found = {ALONE: costs.verify_ms["1"]}
    for c in lengths:
        k = c.num_speculative_tokens
        found[c.name] = costs.verify_ms[str(c.nodes(k))] + costs.draft_ms[c.name][str(k)]
    return found


def _rows(
    decoded: Mapping[str, Repeats],
    batch: int,
    drafters: Sequence[SystemUnderTest],
    costs: Mapping[str, float],
    *,
    greedy: bool,
) -> list[SystemSpeed]:
    fixed = {c.name: c.fixed_length for c in drafters} | {ALONE: True}
    lengths = {c.name: c.num_speculative_tokens for c in drafters}
    alone = [tok_s(repeat) for repeat in decoded[ALONE]]
    if not all(alone):
        raise UserError("No answer has a second token, so there is nothing to time: raise evaluate.max_new_tokens.")
    expected = [g.output_ids for d in decoded[ALONE][0] for g in d.generations]
    rows = []
    for name, repeats in decoded.items():
        speeds = [tok_s(repeat) for repeat in repeats]
        ratios = [ours / base for ours, base in zip(speeds, alone, strict=True)]
        texts = [g.output_ids for d in repeats[0] for g in d.generations]
        groups = [d for repeat in repeats for d in repeat]
        # transformers' own have no rounds of ours to count.
        k = lengths.get(name, 1)
        tau = total((tally_generation(g, k) for d in groups for g in d.generations), k).tau
        # A batch's rounds are those of its slowest row, which tau does not tell.
        known = tau is not None and batch == 1 and fixed.get(name, False)
        ideal = 1000 * tau / costs[name] if known and tau is not None else None
        rows.append(
            SystemSpeed(
                system=name,
                batch=batch,
                tok_s=median(speeds),
                tok_s_spread=(min(speeds), max(speeds)),
                speedup=median(ratios),
                speedup_spread=(min(ratios), max(ratios)),
                tau=tau,
                ideal_tok_s=ideal,
                share_of_ideal=median(speeds) / ideal if ideal else None,
                texts=len(texts),
                equal=sum(a == b for a, b in zip(expected, texts, strict=True)) if greedy else None,
                ms_per_round=ms_per_round(groups),
            )
        )
    return rows


def render(rows: Sequence[SystemSpeed], facts: Mapping[str, Any]) -> str:
    """Return the tables: speeds, then where a round's time goes."""
    hardware = facts["hardware"]
    intro = (
        f"Decoding of {facts['prompts']} prompts, {facts['repeats']} interleaved repeats, {facts['target']['dtype']}, "
        f"temperature {facts['sampling']['temperature']:g}, {facts['date']}, commit {facts['commit']}, "
        f"{hardware['gpu'] or hardware['cpu']}, {hardware['threads']} thread(s)."
    )
    speeds, rounds = [], []
    for row in rows:
        name = [str(row.batch), row.system]
        low, high = row.tok_s_spread
        cells = [f"{row.tok_s:.0f}", f"{low:.0f} to {high:.0f}", f"{row.speedup:.2f}x"]
        cells.append(f"{row.speedup_spread[0]:.2f} to {row.speedup_spread[1]:.2f}")
        cells += ["" if value is None else f"{value:.2f}" for value in (row.tau, row.share_of_ideal)]
        speeds.append([*name, *cells, "" if row.equal is None else f"{row.equal}/{row.texts}"])
        if row.ms_per_round is not None:
            parts = [ms for ms in asdict(row.ms_per_round).values() if ms is not None]
            rounds.append([*name, *(f"{ms:.2f}" for ms in (*parts, sum(parts)))])
    split = markdown_table(("batch", "system", *_ROUNDS), rounds)
    return f"{intro}\n\n{markdown_table(_SPEEDS, speeds)}\nMilliseconds per round:\n\n{split}"


if __name__ == "__main__":
    raise SystemExit(main())
