"""Simulate each drafter of the comparison on the target's own answers, and decode with it once.

The answers of a target at a temperature are made once and kept, so that all drafters face the same texts.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.data.features.store import FeatureSource
from draftsmith.data.packing import Batch
from draftsmith.eval.decode.answers import Generation, Request, Tally, total
from draftsmith.eval.decode.decode import decode
from draftsmith.eval.decode.draft import TargetAlone
from draftsmith.eval.decode.noise import row_key
from draftsmith.eval.decode.sampling import Sampling
from draftsmith.eval.drafters.system import SystemUnderTest, head_system
from draftsmith.eval.measure.bootstrap import Text, bootstrap_tau
from draftsmith.files import fingerprint, write_json
from draftsmith.foreign.journal import Journal
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.target.target import Target
from draftsmith.stages.evaluation import make_requests
from draftsmith.stages.evaluator import Evaluator
from draftsmith.stages.heads import find_head, head_digest
from draftsmith.stages.pipeline import make_stages
from draftsmith.stages.session import Session, say
from draftsmith.stages.training import split_samples
from draftsmith.train.heldout import evaluate_heldout, make_heldout_batches
from scripts.bench.drafters.training import Trained

LENGTHS = (3, 5, 7)
"""Draft lengths of the tables."""
PAIRED = 5
"""The draft length at which drafters are compared prompt by prompt."""
OVERALL = "overall"
_ROWS = 32


class Measure:
    """Measure drafters with the prompts and settings of one recipe.

    session: of that recipe. answers: folder of the target's answers. repeats: how often the prompts are decoded; what is
    simulated has the recipe's own repeats.
    """

    def __init__(self, session: Session, answers: Path, repeats: int = 1) -> None:
        self.session, self.folder, self.spec = session, answers, session.recipe.evaluate
        timed = replace(self.spec, repeats=repeats, generate=False)
        self.timed = Session(replace(session.recipe, evaluate=timed))

    @cached_property
    def target(self) -> Target:
        """The target in the dtype of the evaluation."""
        return self.session.target_in(self.spec.dtype)

    @cached_property
    def prompts(self) -> tuple[list[Request], Any]:
        """The prompts as requests, and the conversations that they begin."""
        return make_requests(self.session, self.target)

    @cached_property
    def inputs(self) -> str:
        """Fingerprint of what drafters are measured on and how, without the drafter."""
        prompts = [(r.sample_id, r.slice, r.prompt_ids, r.max_new_tokens) for r in self.prompts[0]]
        facts = (self.target.fingerprint, self.target.dtype_name, prompts, self.session.recipe.seed, self.spec.repeats)
        draft_probs = [asdict(self.spec.sampling(temperature)) for temperature in self.spec.temperatures]
        return fingerprint([*facts, draft_probs, self.spec.num_speculative_tokens, self.spec.batch])

    def system(self, name: str, run: Trained) -> SystemUnderTest:
        """Return a trained head as a drafter: a block drafter drafts its block, another one as many tokens as the recipe says,
        or its maximum draft length."""
        head = load_head(find_head(self.session.recipe, run.folder), self.target, warn=self.session.warn)
        head = head.deployed(self.target).to(self.target.dtype)
        verifier = head.verifier(self.target)
        asked = self.spec.num_speculative_tokens
        k = head.engine_draft_length(asked)
        tuned = None if verifier is self.target else verifier
        return head_system(name, head, k, max(k, *LENGTHS), verifier=tuned)

    @cached_property
    def _heldout(self) -> tuple[FeatureSource, list[Batch]]:
        made, spec = make_stages(self.session, "extract"), self.session.recipe.train
        _, places = split_samples(self.session, made.samples)
        assert made.features is not None
        return made.features, make_heldout_batches(made.features, places, spec.row_tokens, spec.rows)

    def heldout_tau(self, run: Trained) -> float:
        """Return a head's tau at K = PAIRED on the held-out answers, by which one of several learning rates is chosen, so
        that the prompts of the tables choose nothing."""
        recipe, target = self.session.recipe, self.session.target
        head = load_head(find_head(recipe, run.folder), target, warn=self.session.warn).float().eval()
        data, spec = self._heldout, recipe.train
        sampling = recipe.answers.sampling
        return evaluate_heldout(head, *data, spec.row_tokens, target.head, spec.loss, sampling, PAIRED).tau

    def digest(self, run: Trained) -> str:
        """Return the fingerprint of a trained head."""
        return head_digest(find_head(self.session.recipe, run.folder))

    def answers(self, target: Target, sampling: Sampling) -> list[Generation]:
        """Return what a target alone answers, from the file that keeps it where there is one."""
        repeats = 1 if sampling.greedy else self.spec.repeats
        seed = self.session.recipe.seed
        asked = [
            replace(r, key=row_key(seed, "evaluate", repeat, r.sample_id))
            for repeat in range(repeats)
            for r in self.prompts[0]
        ]
        asked.sort(key=lambda r: len(r.prompt_ids))
        facts = [target.fingerprint, target.dtype_name, asdict(sampling), [asdict(r) for r in asked]]
        file = self.folder / f"answers-t{sampling.temperature:g}-{fingerprint(facts)}.json"
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            return [Generation(r, ids, end) for r, (ids, end) in zip(asked, kept, strict=True)]
        say(f"{len(asked)} answers of {target.path} at temperature {sampling.temperature:g}")
        # Decoding gives the answers back in the order in which they end.
        found = {(g.request.sample_id, g.request.key): g for g in decode(target, TargetAlone(), asked, sampling, _ROWS)}
        made = [found[r.sample_id, r.key] for r in asked]
        write_json(file, [[g.output_ids, g.finish_reason] for g in made])
        return [Generation(g.request, g.output_ids, g.finish_reason) for g in made]

    def simulated(self, system: SystemUnderTest) -> dict[str, Any]:
        """Return, per temperature: tau with its interval per K and slice, the most K being the drafter's own, and the tokens
        and rounds of every prompt at K = PAIRED."""
        own, found = system.verified_by(self.target), {}
        for temperature in self.spec.temperatures:
            sampling = self.spec.sampling(temperature)
            answers = self.answers(own, sampling)
            assert system.simulate is not None
            tallies = system.simulate(own, answers, sampling, system.max_k).tallies
            lengths = sorted({k for k in (*LENGTHS, system.num_speculative_tokens) if k <= system.max_k})
            found[f"{temperature:g}"] = {
                "tau": {str(k): _by_slice(answers, tallies, k) for k in lengths},
                "prompts": self._by_prompt(answers, tallies, min(PAIRED, system.max_k)),
            }
        return found

    def _by_prompt(
        self, answers: Sequence[Generation], tallies: Sequence[Sequence[Tally]], k: int
    ) -> dict[str, list[float]]:
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for answer, found in zip(answers, tallies, strict=True):
            sums[answer.request.sample_id][0] += found[k - 1].tokens
            sums[answer.request.sample_id][1] += found[k - 1].rounds
        ordered = [sums[r.sample_id] for r in self.prompts[0]]
        return {"tokens": [round(a, 3) for a, _ in ordered], "rounds": [round(b, 3) for _, b in ordered]}

    def decoded(self, system: SystemUnderTest) -> dict[str, Any]:
        """Decode the prompts with the drafter and the target alone in turns; return the figures per temperature."""
        system = replace(system, max_k=system.num_speculative_tokens)  # other lengths need not be timed
        evaluator = Evaluator(self.timed, self.target, *self.prompts, [system])
        found = {}
        for temperature in self.spec.temperatures:
            result = evaluator.decoded(self.spec.sampling(temperature), {}, Journal())
            measures, costs = result.drafters[system.name].overall, result.costs
            assert costs is not None
            k, equal = system.num_speculative_tokens, measures.lossless
            found[f"{temperature:g}"] = {
                "K": k,
                "tau": measures.tau,
                "tau_interval": measures.tau_interval,
                "tau_simulated": measures.tau_simulated,
                "speedup": measures.speedup,
                "speedup_spread": measures.speedup_spread,
                "tok_s": measures.decode_tok_s,
                "target_tok_s": measures.baseline_tok_s,
                "draft_ms": costs.draft_ms[system.name][str(k)],
                "target_ms": costs.verify_ms["1"],
                "verify_ms": costs.verify_ms[str(k + 1)],
                "repeats": result.settings.repeats,
                "dtype": result.settings.dtype,
                "equal": None if equal is None else equal.equal,
                "checked": None if equal is None else equal.checked,
            }
        return found


def _by_slice(
    answers: Sequence[Generation], tallies: Sequence[Sequence[Tally]], k: int
) -> dict[str, dict[str, float | tuple[float, float] | None]]:
    """tau and its 95% interval over prompts, overall and per slice."""
    texts = [Text(g, found[k - 1], []) for g, found in zip(answers, tallies, strict=True)]
    slices = sorted({g.request.slice for g in answers})
    scopes = {OVERALL: texts} | {name: [t for t in texts if t.generation.request.slice == name] for name in slices}
    return {
        name: {
            "value": total((t.decoded for t in some), k).tau,
            "interval": bootstrap_tau((t.prompt, t.decoded) for t in some),
        }
        for name, some in scopes.items()
    }
