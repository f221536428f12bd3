"""The decoder beside other decoders, in one run: `python -m scripts.bench.decoder --recipe R --output FOLDER`.

Measured are the target alone, every drafter of the recipe's `evaluate` section, and transformers' own decoding
(`generate`, prompt lookup, assisted generation where the recipe names a draft model). Systems take turns on every prompt,
or on every group of prompts in a batch, so that drifts of the machine hit all alike. Greedy or sampled, at the first of the
recipe's temperatures. Writes bench.json and bench.md.

--batch N (again for more than one), --prompts N per slice, --head FOLDER for another head than the run's best,
--known-acceptance A (at temperature 0) for drafts of which each token is right with probability A.
"""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from tqdm import tqdm

from draftsmith.cli.arguments import require_recipe, take
from draftsmith.errors import UserError
from draftsmith.eval.decode.answers import Decoded, Request
from draftsmith.eval.decode.decode import decode_batch
from draftsmith.eval.decode.draft import Drafter, TargetAlone
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.decode.tally import tally_generation, total
from draftsmith.eval.drafters.contender import Contender, DrafterFactory
from draftsmith.eval.drafters.known_acceptance import KnownAcceptance
from draftsmith.eval.measure.costs import measure_costs
from draftsmith.eval.measure.generate_baseline import GenerateSystem, assisted, looked_up, plain
from draftsmith.eval.measure.machine import environment
from draftsmith.eval.measure.round_profile import RoundProfile, profile_rounds
from draftsmith.files import write_json
from draftsmith.heads.target.target import Target
from scripts.bench.decoder.tables import Row, as_json, render

ALONE = "target alone"
_PROFILED = 6
"""Prompts that rounds are profiled on."""


@dataclass(frozen=True)
class Outcome:
    """One system on one group of prompts: tokens after each answer's first, the seconds they took, and the texts."""

    tokens: int
    seconds: float
    texts: tuple[tuple[int, ...], ...]
    decoded: Decoded | None = None


Run = Callable[[Sequence[Request]], Outcome]


def main(argv: list[str] | None = None) -> int:
    """Measure and write; a user's mistake is one sentence and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words)
    except UserError as error:
        print(f"bench_decoding: {error}", file=sys.stderr)
        return 2


def _main(words: list[str]) -> int:
    output = take(words, "--output") or ["bench"]
    batches = [_count(word, "--batch") for word in (take(words, "--batch") or ["1"])]
    per_slice = [f"--evaluate.per_slice={_count(word, '--prompts')}" for word in take(words, "--prompts")]
    head, alphas = take(words, "--head"), [_share(word) for word in take(words, "--known-acceptance")]
    require_recipe(words, "bench_decoding")
    from draftsmith.recipe.parse import parse_recipe

    recipe = parse_recipe([*words, *per_slice], "bench_decoding", __doc__ or "")
    from draftsmith.stages.session import Session

    rows, facts = bench(Session(recipe), batches, Path(head[-1]) if head else None, alphas)
    folder = Path(output[-1])
    folder.mkdir(parents=True, exist_ok=True)
    text = render(rows, facts)
    write_json(folder / "bench.json", {**facts, "rows": [as_json(row) for row in rows]})
    (folder / "bench.md").write_text(text, encoding="utf-8")
    Console().print(Markdown(text))
    return 0


def _count(word: str, name: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise UserError(f"{name} is {word!r}: give a whole number of at least 1.")
    return int(word)


def _share(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UserError(f"--known-acceptance is {word!r}: give a probability from 0 to 1.")
    return value


def bench(
    session: Any, batches: Sequence[int], head: Path | None, alphas: Sequence[float] = ()
) -> tuple[list[Row], dict[str, Any]]:
    """Measure every system at every batch size; transformers' own answer one prompt at a time."""
    from draftsmith.stages.drafters import at_temperature, load_heads, select_drafters
    from draftsmith.stages.evaluation import make_requests

    spec = session.recipe.evaluate
    target = session.target_in(spec.dtype)
    requests, _ = make_requests(session, target)
    sampling = spec.sampling(spec.temperatures[0])
    longest = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    lineup = at_temperature(select_drafters(session, load_heads(session, target, head), target, longest), sampling)
    lineup += _known(target, requests, sampling, alphas, spec.num_speculative_tokens)
    costs = _ideal_costs(target, lineup, requests, sampling) if 1 in batches else {}
    rows = []
    for batch in batches:
        systems = _systems(target, lineup, sampling, batch)
        outcomes = _take_turns(systems, requests, batch, spec.repeats)
        profiles = _profiles(target, lineup, requests, sampling, batch)
        rows += _rows(outcomes, batch, lineup, costs, profiles, sampling)
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        **environment(),
        "target": {"path": target.path, "fingerprint": target.fingerprint, "dtype": target.dtype_name},
        "prompts": len(requests),
        "repeats": spec.repeats,
        "sampling": asdict(sampling),
    }
    return rows, facts | {"hardware": asdict(facts["hardware"])}


def _known(
    target: Target, requests: Sequence[Request], sampling: Sampling, alphas: Sequence[float], k: int
) -> list[Contender]:
    """Return drafters of known acceptance, which know the answers beforehand."""
    if alphas and not sampling.greedy:
        raise UserError("--known-acceptance needs temperature 0: above it there is no one answer to know.")
    answers = {}
    if alphas:
        alone = decode_batch(target, TargetAlone(), requests, sampling, rows=8).generations
        answers = {g.request.prompt_ids: g.output_ids for g in alone}

    def make(alpha: float) -> DrafterFactory:
        return lambda length: KnownAcceptance(answers, alpha, length, target.vocab_size)

    return [
        Contender(f"known acceptance {alpha:g}", "known_acceptance", make(alpha), k, k, steady=False)
        for alpha in alphas
    ]


def _systems(target: Target, lineup: Sequence[Contender], sampling: Sampling, batch: int) -> dict[str, Run]:
    drafters: dict[str, tuple[Drafter, Any]] = {ALONE: (TargetAlone(), None)}
    drafters |= {c.name: (c.make(c.num_speculative_tokens), c.typical) for c in lineup}

    def ours(drafter: Drafter, typical: Any) -> Run:
        def run(requests: Sequence[Request]) -> Outcome:
            decoded = decode_batch(target, drafter, requests, sampling, typical, rows=batch)
            texts = tuple(tuple(g.output_ids) for g in decoded.generations)
            seconds = sum(value for name, value in decoded.seconds.items() if name != "ttft")
            return Outcome(sum(len(text) - 1 for text in texts), seconds, texts, decoded)

        return run

    systems: dict[str, Run] = {name: ours(*drafter) for name, drafter in drafters.items()}
    if batch == 1:
        systems |= {f"transformers: {s.name}": _theirs(s, sampling) for s in _transformers(target, lineup)}
    return systems


def _transformers(target: Target, lineup: Sequence[Contender]) -> list[GenerateSystem]:
    systems = [plain(target)]
    for c in lineup:
        drafter = c.make(c.num_speculative_tokens)
        if c.method == "prompt_lookup":
            systems.append(looked_up(target, c.num_speculative_tokens))
        if isinstance(model := getattr(drafter, "model", None), Target):
            systems.append(assisted(target, model, c.num_speculative_tokens))
            systems.append(assisted(target, model, c.num_speculative_tokens, confidence=0.4))
    return systems


def _theirs(system: GenerateSystem, sampling: Sampling) -> Run:
    def run(requests: Sequence[Request]) -> Outcome:
        timed = [system.answer(request, sampling) for request in requests]
        return Outcome(sum(t.tokens for t in timed), sum(t.decode_s for t in timed), tuple(t.output_ids for t in timed))

    return run


def _take_turns(
    systems: Mapping[str, Run], requests: Sequence[Request], batch: int, repeats: int
) -> dict[str, list[list[Outcome]]]:
    """Return every system's outcomes, repeat by repeat; a batch has four times its rows waiting."""
    size = 1 if batch == 1 else 4 * batch
    groups = [requests[i : i + size] for i in range(0, len(requests), size)]
    warm = [Request(r.sample_id, r.slice, r.prompt_ids, min(8, r.max_new_tokens)) for r in requests[:batch]]
    for run in systems.values():
        run(warm)
    outcomes: dict[str, list[list[Outcome]]] = {name: [] for name in systems}
    with tqdm(total=repeats * len(requests), desc=f"decoding, batch {batch}", unit="prompt") as bar:
        for _ in range(repeats):
            for found in outcomes.values():
                found.append([])
            for turn, group in enumerate(groups):
                names = list(systems)
                # Who comes first changes, so that nobody always follows the same one.
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    outcomes[name][-1].append(systems[name](group))
                bar.update(len(group))
    return outcomes


def _ideal_costs(
    target: Target, lineup: Sequence[Contender], requests: Sequence[Request], sampling: Sampling
) -> dict[str, float]:
    """Return the separately timed milliseconds of a round of a single prompt: its target pass and its drafts."""
    middle = sorted(requests, key=lambda r: len(r.prompt_ids))[len(requests) // 2]
    ids = list(middle.prompt_ids)
    context = (ids * (1 + middle.max_new_tokens))[: len(ids) + middle.max_new_tokens // 2]
    lengths = [replace(c, simulate=None) for c in lineup if c.method != "known_acceptance"]
    costs = measure_costs(target, lengths, context, sampling)
    found = {ALONE: costs.verify_ms["1"]}
    for c in lengths:
        k = c.num_speculative_tokens
        found[c.name] = costs.verify_ms[str(c.nodes(k))] + costs.draft_ms[c.name][str(k)]
    return found


def _profiles(
    target: Target, lineup: Sequence[Contender], requests: Sequence[Request], sampling: Sampling, batch: int
) -> dict[str, RoundProfile]:
    drafters: dict[str, Drafter] = {ALONE: TargetAlone()}
    drafters |= {c.name: c.make(c.num_speculative_tokens) for c in lineup if c.lossless}
    some = requests[:: max(len(requests) // max(_PROFILED, batch), 1)]
    return {name: profile_rounds(target, drafter, some, sampling, batch) for name, drafter in drafters.items()}


def _rows(
    outcomes: Mapping[str, list[list[Outcome]]],
    batch: int,
    lineup: Sequence[Contender],
    costs: Mapping[str, float],
    profiles: Mapping[str, RoundProfile],
    sampling: Sampling,
) -> list[Row]:
    steady = {c.name: c.steady for c in lineup} | {ALONE: True}
    alone = [_speed(repeat) for repeat in outcomes[ALONE]]
    expected = _texts(outcomes[ALONE][0])
    rows = []
    for name, repeats in outcomes.items():
        speeds = [_speed(repeat) for repeat in repeats]
        ratios = [ours / base for ours, base in zip(speeds, alone, strict=True)]
        texts = _texts(repeats[0])
        tau = _tau(repeats, next((c.num_speculative_tokens for c in lineup if c.name == name), 1))
        # A batch's rounds are those of its slowest row, which tau does not tell.
        known = tau is not None and batch == 1 and steady.get(name, False)
        ideal = 1000 * tau / costs[name] if known and tau is not None else None
        rows.append(
            Row(
                name,
                batch,
                median(speeds),
                (min(speeds), max(speeds)),
                median(ratios),
                (min(ratios), max(ratios)),
                tau,
                ideal,
                median(speeds) / ideal if ideal else None,
                sum(a == b for a, b in zip(expected, texts, strict=True)) if sampling.greedy else None,
                len(texts),
                profiles.get(name),
            )
        )
    return rows


def _speed(repeat: Sequence[Outcome]) -> float:
    tokens, seconds = sum(o.tokens for o in repeat), sum(o.seconds for o in repeat)
    if not tokens:
        raise UserError("No answer has a second token, so there is nothing to time: raise evaluate.max_new_tokens.")
    return tokens / seconds


def _texts(repeat: Sequence[Outcome]) -> list[tuple[int, ...]]:
    return [text for outcome in repeat for text in outcome.texts]


def _tau(repeats: Sequence[Sequence[Outcome]], num_speculative_tokens: int) -> float | None:
    decoded = [o.decoded for repeat in repeats for o in repeat if o.decoded is not None]
    tallies = (tally_generation(g, num_speculative_tokens) for d in decoded for g in d.generations)
    return total(tallies, num_speculative_tokens).tau if decoded else None
