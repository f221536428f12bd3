"""The measurements of an evaluation at one sampling setting: decode or simulate, and build the result."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from draftsmith.data.conversations.load import Conversation
from draftsmith.decoder.answers import Decoded, Generation, Request, Tally, total
from draftsmith.decoder.decode import decode, decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.noise import row_key
from draftsmith.decoder.sampling import Sampling
from draftsmith.eval.clocks.cost_table import CostTable
from draftsmith.eval.clocks.costs import fits_in_memory, measure_costs
from draftsmith.eval.clocks.turns import SIMULATED_BATCH, Repeats, pack_decoded, run_systems, unpack_decoded
from draftsmith.eval.drafters.generate_baseline import plain
from draftsmith.eval.drafters.system import SystemUnderTest, simulate_systems
from draftsmith.eval.measure.lossless import compare_texts
from draftsmith.eval.measure.measure import (
    collect_texts,
    measure_change,
    measure_pick,
    pairs_of,
    sum_prompts,
    summarize,
    sweep_point,
)
from draftsmith.eval.measure.quality import judge_answer
from draftsmith.eval.planner.plan import round_cost
from draftsmith.eval.results.bootstrap import Text, bootstrap_tau, is_looping
from draftsmith.eval.results.conditions import Thinking, acceptance_by_condition
from draftsmith.eval.results.result import (
    WARNING,
    Costs,
    DrafterResult,
    Example,
    Lossless,
    Measures,
    Piece,
    Result,
    Settings,
    environment,
)
from draftsmith.eval.simulate.texts import Simulation
from draftsmith.foreign.journal import Journal
from draftsmith.progress import Bar, say
from draftsmith.recipe.evaluate import EvaluateSpec
from draftsmith.stages.drafters import at_temperature
from draftsmith.stages.planning import longest_text, median_request, target_info
from draftsmith.stages.session import Session
from draftsmith.storage import fingerprint
from draftsmith.target.target import Target

_KEPT_BATCHES = 4
"""Batches of them that are kept together: those of an interrupted one are made again."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates drafters on the same prompts at one temperature after the other. conversations: those that the prompts
    begin, by id."""

    session: Session
    target: Target
    requests: Sequence[Request]
    conversations: Mapping[str, Conversation]
    systems: list[SystemUnderTest]

    @property
    def spec(self) -> EvaluateSpec:
        """The section `evaluate` of the recipe."""
        return self.session.recipe.evaluate

    @cached_property
    def _thinking(self) -> Thinking:
        return Thinking(partial(self.session.tokenizer.decode, skip_special_tokens=False), self.spec.thinking)

    def decoded(
        self,
        sampling: Sampling,
        lossless: Mapping[str, Mapping[str, Lossless]],
        journal: Journal,
        table: CostTable | None = None,
    ) -> Result:
        """Return the result of decoding with every drafter and the target alone in turns, and of simulating the same texts.

        journal: what an interrupted evaluation at this setting has measured. table: costs to plan with; the draft length that is
        fastest by them, and its neighbours, take some of the turns.
        """
        spec, systems = self.spec, at_temperature(self.systems, sampling)
        repeats = [[self._keyed(r, repeat) for r in self.requests] for repeat in range(spec.repeats)]
        if (kept := journal.get("costs")) is None:
            costs = measure_costs(self.target, systems, self._typical_context(systems), sampling, rows=spec.batch)
            journal.add("costs", asdict(costs))
        else:
            costs = Costs(**kept)
        picks = {} if table is None else self._picks(systems, table, sampling, journal)
        count, title = spec.repeats * len(self.requests), f"decoding at T={sampling.temperature:g}"
        torch.manual_seed(self.session.recipe.seed)  # which `generate` draws from
        with Bar(total=count, desc=title, unit="prompt") as bar:
            turns = run_systems(
                self.target,
                systems,
                repeats,
                sampling,
                batch=spec.batch,
                on_batch=bar.update,
                on_kept=bar.skip,
                picks=list(picks),
                generate=plain(self.target) if spec.generate and spec.batch == 1 else None,
                journal=journal,
            )
        timings = turns.by_name
        drafters: dict[str, DrafterResult] = {}
        off_text: dict[str, int] = {}
        examples: list[Example] = []
        for c in systems:
            found = collect_texts(self.target, c, timings, sampling, self._judge)
            checked = sampling.greedy and c.lossless
            compared = self._compare_timed(c, timings[""], found.texts, sampling) if checked else {}
            # Timed in float32, the timed texts are the exact check.
            exact = self.target.dtype == torch.float32
            greedy = compared if exact else lossless.get(c.name, {}) if sampling.greedy else {}
            measured = (found, timings, costs, greedy, {} if exact else compared, turns.generate)
            drafters[c.name] = summarize(c, *measured, self._thinking)
            off_text[c.name] = found.off_text
            # Every slice for the first drafter, one for the others.
            examples += self._examples(c.name, found.texts)[: None if c is systems[0] else 1]
        result = self._result(sampling, drafters, off_text, batch=spec.batch, repeats=spec.repeats)
        timed = [measure_pick(self.target, c, name, timings, sampling) for c, name in picks.items()]
        if picks:  # the decoded draft length, to compare with on the same prompts
            one, name = next(iter(picks.items()))
            own = next(c for c in systems if c.name == name)
            if own.num_speculative_tokens not in {c.num_speculative_tokens for c in picks}:
                timed.append(measure_pick(self.target, own, name, timings, sampling, one.name))
        return replace(result, costs=costs, examples=tuple(examples), picks=tuple(timed), clocks=turns.clocks)

    def _picks(
        self, systems: Sequence[SystemUnderTest], table: CostTable, sampling: Sampling, journal: Journal
    ) -> dict[SystemUnderTest, str]:
        """Return the draft that is fastest by costs and simulated acceptance, and its neighbours, with the name it goes by, and say
        how long decoding will take. The neighbours of a tree are the same one with a level more or less.

        The target alone answers in large batches for that, which is not timed.
        """
        if (kept := journal.get("picks")) is not None:
            return {_with_length(c, k): c.name for name, k in kept for c in systems if c.name == name}
        found = [c for c in systems if c.simulate and c.fixed_length and c.verifier is None]
        if not found or self.spec.batch not in table.batches:
            return {}
        point = table.middle(self.spec.batch)
        say(f"evaluate: choosing a draft length at T={sampling.temperature:g}")
        requests = sorted((self._keyed(r, 0) for r in self.requests), key=lambda r: len(r.prompt_ids))
        longest, fewer = longest_text(requests), (SIMULATED_BATCH, 8, 2)
        rows = next((n for n in fewer if fits_in_memory(self.target, n, longest)), 1)
        answers = _answers(self.target, requests, sampling, journal, rows)
        gains: dict[tuple[SystemUnderTest, int], float] = {}
        simulations = simulate_systems(self.target, found, answers, sampling)
        for c, simulation in zip(found, simulations, strict=True):
            for k in range(1, c.max_k + 1):
                tau, cost = total((t[k - 1] for t in simulation.tallies), k).tau, round_cost(table, point, c.name, k)
                if tau is not None and cost is not None:
                    gains[c, k] = cost.speedup(tau)
        if not gains:
            return {}
        best, k = max(gains, key=lambda key: gains[key])
        lengths = [n for n in (k - 1, k, k + 1) if (best, n) in gains]
        journal.add("picks", [[best.name, n] for n in lengths])
        # What was not simulated is taken to be as fast as the target alone.
        speeds = [1.0, *(gains.get((c, c.num_speculative_tokens), 1.0) for c in systems)]
        tokens = sum(len(g.output_ids) for g in answers) * self.spec.repeats
        minutes = tokens * point.alone_ms / self.spec.batch * sum(1 / speed for speed in speeds) / 60_000
        what = f"{'token' if best.tree is None else 'level'}{'s' if k > 1 else ''}"
        say(
            f"evaluate: by simulation and costs {best.name} drafting {k} {what} is "
            f"{gains[best, k]:.2f}x as fast as the target alone; "
            f"decoding will take about {max(1, round(minutes))} min"
        )
        return {_with_length(best, n): best.name for n in lengths}

    def _typical_context(self, systems: Sequence[SystemUnderTest]) -> list[int]:
        """Return the prompt of median length, continued to half of its longest answer."""
        request = median_request(self.requests)
        ids = list(request.prompt_ids)
        longest = self.target.context_length - max(c.nodes(c.max_k) for c in systems) - 1
        return (ids + ids * request.max_new_tokens)[: min(len(ids) + request.max_new_tokens // 2, longest)]

    def _compare_timed(
        self, system: SystemUnderTest, alone: Repeats, texts: Sequence[Text], sampling: Sampling
    ) -> dict[str, Lossless]:
        """Compare the greedy texts of the timed run with the target's, in the dtype of the run.

        Drafts for a tuned target are compared with the texts of that one, which are decoded here.
        """
        k, own = system.num_speculative_tokens, system.verified_by(self.target)
        answers = [g for d in alone[0] for g in d.generations]
        if own is not self.target:
            answers = decode_batch(own, TargetAlone(), self.requests, sampling, rows=self.spec.batch).generations
        expected = {g.request.sample_id: g for g in answers}
        return compare_texts(
            own,
            [expected[t.generation.request.sample_id] for t in texts],
            [t.generation for t in texts],
            [t.decoded for t in texts],
            [t.simulated[k - 1] for t in texts] if system.simulate is not None else None,
            k,
            sampling,
        )

    def simulated(self, sampling: Sampling, journal: Journal) -> Result:
        """Let the target alone answer in large batches, then simulate every drafter on the answers; nothing is timed.

        journal: the answers of an interrupted simulation at this setting.
        A tuned target answers for itself, as acceptance is exact on the verifier's own answers only.
        """
        spec = self.spec
        repeats = 1 if sampling.greedy else spec.repeats
        requests = [self._keyed(r, repeat) for repeat in range(repeats) for r in self.requests]
        requests.sort(key=lambda r: len(r.prompt_ids))
        by_verifier: dict[Target, list[SystemUnderTest]] = {self.target: []}
        for c in self.systems:
            if c.simulate is None:
                why = "what it drafts depends on more than the text" if c.lossless else "its texts are not the target's"
                say(f"evaluate: {c.name} cannot be simulated, as {why}; it is left out")
            else:
                by_verifier.setdefault(c.verified_by(self.target), []).append(c)
        answers = {own: _answers(own, requests, sampling, journal, SIMULATED_BATCH) for own in by_verifier}
        simulations: dict[str, Simulation] = {}
        for own, systems in by_verifier.items():
            names = [c.name for c in systems]
            simulations |= zip(names, simulate_systems(own, systems, answers[own], sampling), strict=True)
        drafters: dict[str, DrafterResult] = {}
        for c in (c for c in self.systems if c.name in simulations):
            own, changed = c.verified_by(self.target), {}
            if c.verifier is not None:
                changed = measure_change(self.target, c, answers[own], answers[self.target], self._judge)
            drafters[c.name] = self._simulated_drafter(c, answers[own], simulations[c.name].tallies, changed)
        off_text = {name: simulations[name].off_text for name in drafters}
        return self._result(sampling, drafters, off_text, batch=SIMULATED_BATCH, repeats=repeats)

    def _simulated_drafter(
        self,
        c: SystemUnderTest,
        generations: Sequence[Generation],
        tallies: Sequence[Sequence[Tally]],
        changed: Mapping[str, Mapping[str, Any]],
    ) -> DrafterResult:
        """Return a drafter's measures on the target's own answers. changed: by `measure_change`, for a tuned target."""

        expected = [of_answer[c.num_speculative_tokens - 1] for of_answer in tallies]
        prompts = sum_prompts((g, None, tally) for g, tally in zip(generations, expected, strict=True))

        def scope(slice_name: str | None) -> Measures:
            places = [i for i, g in enumerate(generations) if slice_name in (None, g.request.slice)]
            sweep = [total((tallies[i][n] for i in places), n + 1) for n in range(c.max_k)]
            chosen = sweep[c.num_speculative_tokens - 1]
            points = tuple(sweep_point(c, n + 1, t) for n, t in enumerate(sweep))
            some = [p for p in prompts.values() if slice_name in (None, p.slice)]
            return Measures(
                prompts=len(some),
                tokens=int(chosen.tokens),
                tau_simulated=chosen.tau,
                tau_simulated_interval=bootstrap_tau(pairs_of(some, simulated=True)),
                acceptance_rate=points[c.num_speculative_tokens - 1].acceptance_rate,
                acceptance_at_simulated=tuple(chosen.acceptance_at),
                alpha_at_simulated=tuple(chosen.alpha_at),
                **acceptance_by_condition(
                    c.trained_length,
                    self._thinking,
                    [],
                    [(generations[i], expected[i]) for i in places],
                ),
                k_sweep=points,
                looping=sum(is_looping(generations[i].output_ids) for i in places) / len(places),
                **changed.get(slice_name or "overall", {}),
            )

        slices = dict.fromkeys(r.slice for r in self.requests)
        return DrafterResult(scope(None), {name: scope(name) for name in slices}, c.info, prompts)

    def _judge(self, generation: Generation) -> dict[str, bool]:
        """Return what can be told of an answer."""
        text = self.session.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        request = generation.request
        reference = self.conversations[request.sample_id].reference
        return judge_answer(text, request.slice, reference, self.spec.thinking[1])

    def _keyed(self, request: Request, repeat: int) -> Request:
        """Return the request with a random key of its own per repeat: greedy answers are the same, sampled ones differ."""
        return replace(request, key=row_key(self.session.recipe.seed, "evaluate", repeat, request.sample_id))

    def _result(
        self,
        sampling: Sampling,
        drafters: dict[str, DrafterResult],
        off_text: Mapping[str, int],
        *,
        batch: int,
        repeats: int,
    ) -> Result:
        recipe, target = self.session.recipe, self.target
        return Result(
            command=shlex.join(["draftsmith", *sys.argv[1:]]),
            **environment(),
            recipe=asdict(recipe),
            target=target_info(self.session, target),
            settings=Settings(
                temperature=sampling.temperature,
                top_k=sampling.top_k or None,
                top_p=sampling.top_p if sampling.top_p < 1 else None,
                num_speculative_tokens=self.spec.num_speculative_tokens,
                batch=batch,
                dtype=target.dtype_name,
                seed=recipe.seed,
                repeats=repeats,
                min_p=sampling.min_p or None,
                repetition_penalty=sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
                prompts=self._prompts_digest(),
                longest_text=longest_text(self.requests),
            ),
            drafters=drafters,
            supplement={
                f"tokens off the target's own choice in the teacher-forced pass ({name})": count
                for name, count in off_text.items()
            }
            | {f"{WARNING} {number}": text for number, text in enumerate(self.session.warnings, 1)},
        )

    def _prompts_digest(self) -> str:
        """Identify the prompts as they were given, so that it stays the same where a new target reads them as other tokens."""
        chosen, limits = [self.conversations[r.sample_id] for r in self.requests], self.spec.max_new_tokens_by_slice
        asked = [(c.id, c.slice, c.prompt(), c.tools, limits.get(c.slice, self.spec.max_new_tokens)) for c in chosen]
        return fingerprint(asked)

    def _examples(self, name: str, texts: Sequence[Text]) -> list[Example]:
        """Return the first answer of each slice, token by token, with the draft position that each token came from."""
        allowed = self.spec.example_slices
        first: dict[str, Generation] = {}
        for generation in (text.generation for text in texts):
            if not allowed or generation.request.slice in allowed:
                first.setdefault(generation.request.slice, generation)
        found = []
        for slice_name, g in first.items():
            prompt = self.conversations[g.request.sample_id].prompt()
            text = "\n\n".join(str(message.get("content") or "") for message in prompt)
            found.append(Example(name, slice_name, text, self._pieces(g)))
        return found

    def _pieces(self, generation: Generation) -> tuple[Piece, ...]:
        positions: list[int | None] = [None]
        for round_ in generation.rounds:
            positions += [*range(round_.accepted), None]
        decode = self.session.tokenizer.decode
        # Where the text ended on an accepted draft, the last round has no token of the target's own.
        return tuple(Piece(decode([i]), p) for i, p in zip(generation.output_ids, positions, strict=False))


def _with_length(system: SystemUnderTest, k: int) -> SystemUnderTest:
    return replace(system, name=f"{system.name}, K = {k}", num_speculative_tokens=k)


def _answers(
    target: Target,
    requests: Sequence[Request],
    sampling: Sampling,
    journal: Journal,
    rows: int,
) -> list[Generation]:
    """Let a target answer alone, `rows` requests at a time. journal: keeps the answers, a few batches together."""
    size = _KEPT_BATCHES * rows
    found: list[Generation] = []
    with Bar(total=len(requests), desc=f"answers at T={sampling.temperature:g}", unit="answer") as bar:
        for start in range(0, len(requests), size):
            chunk = requests[start : start + size]
            # The rows that fit may be others than when the journal was begun, and the chunks with them.
            name = f"answers of {target.fingerprint}/{start}+{len(chunk)}"
            if (kept := journal.get(name)) is not None:
                found += unpack_decoded(kept, chunk).generations
                bar.skip(len(chunk))
                continue
            made: dict[int, Generation] = {}
            for generation in decode(target, TargetAlone(), chunk, sampling, rows):
                made[id(generation.request)] = generation
                bar.update()
            found += [made[id(request)] for request in chunk]
            journal.add(name, pack_decoded(Decoded(found[start:], {})))
    return found
