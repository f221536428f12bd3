"""The steps of an evaluation at one sampling setting, from prompts and drafters to a result, by decoding or by simulation.

costs -> draft lengths to time -> texts decoded in turns -> texts simulated and judged -> greedy equality -> result
answers of the target -> texts simulated and judged -> result
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from draftsmith.decoder.answers import Generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.clocks.cost_table import CostTable
from draftsmith.eval.clocks.costs import fits_in_memory, measure_costs
from draftsmith.eval.clocks.turns import Repeats, run_systems
from draftsmith.eval.drafters.baselines import plain
from draftsmith.eval.drafters.system import SystemUnderTest, simulate_systems
from draftsmith.eval.measure.measure import measure_pick, summarize
from draftsmith.eval.measure.texts import Originals, Text, Texts, collect_texts, compare_texts, distinct, judge_answer
from draftsmith.eval.planner.plan import round_cost
from draftsmith.eval.results.conditions import Thinking
from draftsmith.eval.results.result import WARNING, Costs, Example, Lossless, Piece, Result, Settings, TargetInfo
from draftsmith.eval.simulate.answers import SIMULATED_BATCH, answer_alone
from draftsmith.foreign.records import Journal
from draftsmith.machine import command_line, environment
from draftsmith.progress import say
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.drafters import at_temperature
from draftsmith.stages.prompts import Prompts
from draftsmith.target.target import Target


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, at one temperature after the other: prompts that drafters and a target alone answer.

    info: of the target. tokenizer: the target's. warnings: what makes the results doubtful.
    """

    recipe: Recipe
    target: Target
    info: TargetInfo
    prompts: Prompts
    drafters: list[SystemUnderTest]
    tokenizer: Any
    warnings: Sequence[str]

    @cached_property
    def thinking(self) -> Thinking:
        """Counts the tokens of an answer that are thought."""
        return Thinking(partial(self.tokenizer.decode, skip_special_tokens=False), self.recipe.evaluate.thinking)

    def judge(self, generation: Generation) -> dict[str, bool]:
        """Return whether an answer is right and whether it is JSON, as far as that can be told."""
        text = self.tokenizer.decode(self.thinking.answer(generation), skip_special_tokens=True)
        reference = self.prompts.conversations[generation.request.sample_id].reference
        return judge_answer(text, generation.request.slice, reference)


def decode_drafters(
    evaluation: Evaluation,
    sampling: Sampling,
    journal: Journal,
    table: CostTable | None = None,
    exact: Mapping[str, Mapping[str, Lossless]] | None = None,
) -> Result:
    """Return the result of decoding with every drafter and the target alone in turns, and of simulating the same texts.

    journal: what an interrupted evaluation at this setting has measured. table: costs to plan with; the draft length that is
    fastest by them, and its neighbours, take some of the turns. exact: greedy equality in float32, of drafters by name.
    """
    spec, target = evaluation.recipe.evaluate, evaluation.target
    systems = at_temperature(evaluation.drafters, sampling)
    costs = _costs(evaluation, systems, sampling, journal)
    chosen = [] if table is None else choose_lengths(evaluation, systems, sampling, table, journal)
    torch.manual_seed(evaluation.recipe.seed)  # which `generate` draws from
    repeats = [evaluation.prompts.repeat(number) for number in range(spec.repeats)]
    generated = [plain(target)] if spec.generate and spec.batch == 1 else []
    picks: list[Any] = [*(c for _, c in chosen), *generated]
    turns = run_systems(target, systems, repeats, sampling, batch=spec.batch, picks=picks, journal=journal)
    drafters, off_text, examples = {}, {}, list[Example]()
    originals = Originals(target, distinct(turns.by_name[""], sampling), evaluation.judge)
    for c in systems:
        texts = collect_texts(target, c, turns.by_name, sampling, originals)
        if sampling.greedy:
            texts = _with_equality(evaluation, c, texts, turns.by_name[""], sampling, (exact or {}).get(c.name, {}))
        drafters[c.name] = summarize(c, texts, turns, costs, evaluation.thinking)
        off_text[c.name] = texts.off_text
        # Every slice for the first drafter, one for the others.
        examples += _examples(evaluation, c.name, texts.texts)[: None if c is systems[0] else 1]
    result = _make_result(evaluation, sampling, off_text, batch=spec.batch, repeats=spec.repeats)
    # What the chosen draft lengths reached, and the decoded one of the same drafter on the same prompts.
    reached = [measure_pick(target, c, name, turns.by_name, sampling) for name, c in chosen]
    if chosen:
        name, first = chosen[0]
        own = next(c for c in systems if c.name == name)
        if own.num_speculative_tokens not in {c.num_speculative_tokens for _, c in chosen}:
            reached.append(measure_pick(target, own, name, turns.by_name, sampling, first.name))
    result = replace(result, drafters=drafters, costs=costs, examples=tuple(examples))
    return replace(result, picks=tuple(reached), clocks=turns.clocks)


def _with_length(system: SystemUnderTest, k: int) -> tuple[str, SystemUnderTest]:
    """Return the name of a drafter, and the drafter with another draft length under a name of its own; of a tree, with another depth."""
    return system.name, replace(system, name=f"{system.name}, K = {k}", num_speculative_tokens=k)


def choose_lengths(
    evaluation: Evaluation, systems: list[SystemUnderTest], sampling: Sampling, table: CostTable, journal: Journal
) -> list[tuple[str, SystemUnderTest]]:
    """Return the draft that is fastest by costs and simulated acceptance, and its neighbours, of a tree the same one with a level
    more or less, as `_with_length` does; say how long decoding will take.

    The target alone answers in large batches for that, which is not timed. Empty where nothing can be simulated, or has a cost.
    """
    if (kept := journal.get("picks")) is not None:
        return [_with_length(c, k) for name, k in kept for c in systems if c.name == name]
    target, requests = evaluation.target, evaluation.prompts.repeat(0)
    batch, repeats = evaluation.recipe.evaluate.batch, evaluation.recipe.evaluate.repeats
    simulated = [c for c in systems if c.simulate and c.fixed_length and c.verifier is None]
    if not simulated or batch not in table.batches:
        return []
    say(f"evaluate: choosing a draft length at T={sampling.temperature:g}")
    point, longest = (
        table.middle(batch).at(sampling.temperature),
        max(len(r.prompt_ids) + r.max_new_tokens for r in requests),
    )
    rows = next((n for n in (SIMULATED_BATCH, 8, 2) if fits_in_memory(target, n, longest)), 1)
    answers = answer_alone(target, requests, sampling, journal, rows)
    speedups: dict[tuple[SystemUnderTest, int], float] = {}
    for c, simulation in zip(simulated, simulate_systems(target, simulated, answers, sampling), strict=True):
        for k in range(1, c.max_k + 1):
            tau, cost = total((t[k - 1] for t in simulation.tallies), k).tau, round_cost(table, point, c.name, k)
            if tau is not None and cost is not None:
                speedups[c, k] = cost.speedup(tau)
    if not speedups:
        return []
    best, k = max(speedups, key=lambda key: speedups[key])
    lengths = [n for n in (k - 1, k, k + 1) if (best, n) in speedups]
    journal.add("picks", [[best.name, n] for n in lengths])
    # What was not simulated is taken to be as fast as the target alone.
    speeds = [1.0, *(speedups.get((c, c.num_speculative_tokens), 1.0) for c in systems)]
    tokens = sum(len(g.output_ids) for g in answers) * repeats
    minutes = tokens * point.alone_ms / batch * sum(1 / speed for speed in speeds) / 60_000
    what = f"{'token' if best.tree is None else 'level'}{'s' if k > 1 else ''}"
    say(
        f"evaluate: by simulation and costs {best.name} drafting {k} {what} is "
        f"{speedups[best, k]:.2f}x as fast as the target alone; decoding will take about {max(1, round(minutes))} min"
    )
    return [_with_length(best, n) for n in lengths]


def _costs(evaluation: Evaluation, systems: list[SystemUnderTest], sampling: Sampling, journal: Journal) -> Costs:
    """Time single steps behind the prompt of median length, continued to half of its longest answer."""
    if (kept := journal.get("costs")) is not None:
        return Costs(**kept)
    target, request = evaluation.target, evaluation.prompts.median
    ids = list(request.prompt_ids)
    longest = target.context_length - max(c.nodes(c.max_k) for c in systems) - 1
    context = (ids + ids * request.max_new_tokens)[: min(len(ids) + request.max_new_tokens // 2, longest)]
    costs = measure_costs(target, systems, context, sampling, rows=evaluation.recipe.evaluate.batch)
    journal.add("costs", asdict(costs))
    return costs


def _with_equality(
    evaluation: Evaluation,
    system: SystemUnderTest,
    texts: Texts,
    alone: Repeats,
    sampling: Sampling,
    exact: Mapping[str, Lossless],
) -> Texts:
    """Compare the greedy texts of the timed run with the target's, in the dtype of the run. exact: the same in float32.

    Drafts for a tuned target are compared with the texts of that one, which are decoded here.
    """
    fields: dict[str, dict[str, Lossless]] = {scope: {"lossless": equal} for scope, equal in exact.items()}
    if not system.lossless:
        return texts.with_fields(fields)
    target, k = evaluation.target, system.num_speculative_tokens
    own, answers = system.verified_by(target), [g for d in alone[0] for g in d.generations]
    if own is not target:
        batch = evaluation.recipe.evaluate.batch
        answers = decode_batch(own, TargetAlone(), evaluation.prompts.requests, sampling, rows=batch).generations
    expected = {g.request.sample_id: g for g in answers}
    compared = compare_texts(
        own, [expected[t.generation.request.sample_id] for t in texts.texts], texts.texts, k, sampling
    )
    # Timed in float32, the timed texts are the exact check.
    name = "lossless" if target.dtype == torch.float32 else "lossless_timed"
    for scope, equal in compared.items():
        fields.setdefault(scope, {})[name] = equal
    return texts.with_fields(fields)


def simulate_drafters(evaluation: Evaluation, sampling: Sampling, journal: Journal) -> Result:
    """Let the target alone answer in large batches, then simulate every drafter on the answers; nothing is timed.

    journal: the answers of an interrupted simulation at this setting.
    A tuned target answers for itself, as acceptance is exact on the verifier's own answers only.
    """
    target, repeats = evaluation.target, 1 if sampling.greedy else evaluation.recipe.evaluate.repeats
    requests = [r for number in range(repeats) for r in evaluation.prompts.repeat(number)]
    by_verifier: dict[Target, list[SystemUnderTest]] = {target: []}
    for c in evaluation.drafters:
        if c.simulate is None:
            why = "what it drafts depends on more than the text" if c.lossless else "its texts are not the target's"
            say(f"evaluate: {c.name} cannot be simulated, as {why}; it is left out")
        else:
            by_verifier.setdefault(c.verified_by(target), []).append(c)
    answers = {own: answer_alone(own, requests, sampling, journal) for own in by_verifier}
    originals, texts = Originals(target, answers[target], evaluation.judge), dict[str, Texts]()
    for own, systems in by_verifier.items():
        for c, simulation in zip(systems, simulate_systems(own, systems, answers[own], sampling), strict=True):
            changed = {} if c.verifier is None else originals.changed_by(c, answers[own])
            parts = zip(answers[own], simulation.tallies, simulation.by_budget, strict=True)
            texts[c.name] = Texts([Text(g, None, *tallies) for g, *tallies in parts], simulation.off_text, changed)
    simulated = [c for c in evaluation.drafters if c.name in texts]
    off_text = {c.name: texts[c.name].off_text for c in simulated}
    result = _make_result(evaluation, sampling, off_text, batch=SIMULATED_BATCH, repeats=repeats)
    drafters = {c.name: summarize(c, texts[c.name], thought_of=evaluation.thinking) for c in simulated}
    return replace(result, drafters=drafters)


def _make_result(
    evaluation: Evaluation, sampling: Sampling, off_text: Mapping[str, int], *, batch: int, repeats: int
) -> Result:
    """Return a result of no drafters: what was run, and how."""
    recipe, prompts = evaluation.recipe, evaluation.prompts
    settings = Settings(
        temperature=sampling.temperature,
        top_k=sampling.top_k or None,
        top_p=sampling.top_p if sampling.top_p < 1 else None,
        num_speculative_tokens=recipe.evaluate.num_speculative_tokens,
        batch=batch,
        dtype=evaluation.target.dtype_name,
        seed=recipe.seed,
        repeats=repeats,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        prompts=prompts.digest(recipe.evaluate),
        longest_text=prompts.longest_text,
    )
    off = {
        f"tokens off the target's own choice in the teacher-forced pass ({n})": count for n, count in off_text.items()
    }
    return Result(
        command=command_line(),
        **environment(),
        recipe=asdict(recipe),
        target=evaluation.info,
        settings=settings,
        drafters={},
        supplement=off | {f"{WARNING} {number}": text for number, text in enumerate(evaluation.warnings, 1)},
    )


def _examples(evaluation: Evaluation, name: str, texts: Sequence[Text]) -> list[Example]:
    """Return the first answer of each slice, token by token, with the draft position that each token came from."""
    allowed = evaluation.recipe.evaluate.example_slices
    first: dict[str, Generation] = {}
    for generation in (text.generation for text in texts):
        if not allowed or generation.request.slice in allowed:
            first.setdefault(generation.request.slice, generation)
    examples = []
    for slice_name, g in first.items():
        prompt = evaluation.prompts.conversations[g.request.sample_id].prompt()
        text = "\n\n".join(str(message.get("content") or "") for message in prompt)
        positions: list[int | None] = [None]
        for round_ in g.rounds:
            positions += [*range(round_.accepted), None]
        # Where the text ended on an accepted draft, the last round has no token of the target's own.
        pairs = zip(_spelled(evaluation.tokenizer, g.output_ids), positions, strict=False)
        examples.append(Example(name, slice_name, text, tuple(Piece(*pair) for pair in pairs)))
    return examples


def _spelled(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    """Yield what each token adds to the text: alone it may lose a space, or hold a part of a character, which stands with the token
    that ends it."""
    decode, start, spelled = partial(tokenizer.decode, clean_up_tokenization_spaces=False), 0, 0
    for n in range(1, len(ids) + 1):
        # From the tokens before, on which the spaces of a token depend, not from the first.
        before, text = decode(ids[start:spelled]), decode(ids[start:n])
        if n < len(ids) and text.endswith("\ufffd"):
            yield ""
            continue
        yield text[len(before) :]
        start, spelled = spelled, n
