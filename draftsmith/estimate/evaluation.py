"""The time that an evaluation takes, part by part, as its recipe asks for it (draftsmith/stages/evaluation.py does the work).

The evaluation is to find out how many tokens a round brings. The plan assumes TOKENS_PER_ROUND. It counts no draft as faster than the
target alone, and leaves out the time of drafting.
"""

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from draftsmith.estimate.figures import Estimate
from draftsmith.eval.clocks.costs import IN_A_ROW, REPEATS, SECONDS, WARM_UP, caches_of, pass_sizes, repeats_within
from draftsmith.eval.clocks.turns import FEW
from draftsmith.eval.drafters.system import is_simulated, tree_kind
from draftsmith.eval.simulate.answers import SIMULATED_BATCH
from draftsmith.heads.registry import find_method
from draftsmith.recipe.evaluate import DraftSpec, EvaluateSpec

TOKENS_PER_ROUND = 2.0
_PICKS = 3
"""Draft lengths that are timed because the decision names them."""


@dataclass(frozen=True)
class Way:
    """A way to draft, as an evaluation measures it. nodes: tokens that the target reads in a round, the root included. simulated:
    whether a pass over the text tells its acceptance. greedy: whether it is measured at temperature 0, too."""

    nodes: int
    chain: bool = True
    simulated: bool = True
    greedy: bool = True


@dataclass(frozen=True)
class EvaluationEstimate:
    """The seconds of a recipe's evaluation."""

    estimate: Estimate

    @property
    def spec(self) -> EvaluateSpec:
        """The section `evaluate` of the recipe."""
        return self.estimate.recipe.evaluate

    @property
    def count(self) -> int:
        """Prompts of all slices."""
        return sum(self.estimate.prompts.values())

    @cached_property
    def ways(self) -> list[Way]:
        """The drafters: every head in every way to draft that it can, and the baselines."""
        spec, chain = self.spec, Way(1 + self.spec.num_speculative_tokens)
        own = find_method(self.estimate.recipe.method).trees_of(self.estimate.recipe.head)
        found: list[Way] = []
        for head in (self.estimate.recipe.method, *spec.beside):
            for draft in spec.drafts:
                tree = draft.load()
                # What a head of `beside` can draft is not known before it is opened.
                able = tree is None or head in spec.beside or tree_kind(tree, draft.drawn) in own
                if able and (not draft.heads or head in draft.heads):
                    nodes = chain.nodes if tree is None else tree.max_nodes
                    simulated = draft.typical is None and is_simulated(tree, draft.drawn)
                    found.append(Way(nodes, tree is None, simulated, _greedy(draft, spec)))
        return found + [chain] * len(spec.baselines)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by what is done; they add up to the whole."""
        found = {"decoding": 0.0, "simulation": 0.0, "costs": self._cost_table()}
        found["equality in float32"] = self._equality()
        for temperature in self.spec.temperatures:
            ways = [way for way in self.ways if temperature > 0 or way.greedy]
            # The target alone and every way, in every repeat, and `generate` on a few prompts of each slice.
            generate = self.spec.generate and self.spec.batch == 1
            once = sum(self.tokens() * self._token(way, self.spec.batch) + self._prefill for way in (None, *ways))
            found["decoding"] += self.spec.repeats * (once + generate * self.tokens(FEW) * self._token(None, 1))
            found["simulation"] += self._simulation(ways, 1 if temperature == 0 else self.spec.repeats)
            # Passes of every size that a way may need, at the recipe's batch.
            sizes = {1, *(nodes for way in ways for nodes in self._sizes(way))}
            found["costs"] += (REPEATS + WARM_UP) * sum(self._round(nodes, self.spec.batch) for nodes in sizes)
            if self.spec.plan_batches and any(way.simulated for way in ways):
                # The target alone answers in large batches and every way is simulated; then the lengths take their
                # turns.
                spec, chain = self.spec, Way(1 + self.spec.num_speculative_tokens)
                answers = self.tokens() * self._token(None, min(SIMULATED_BATCH, self.count)) + self._prefill
                picks = spec.repeats * _PICKS * self.tokens(FEW) * self._token(chain, spec.batch)
                found["draft lengths"] = found.get("draft lengths", 0.0) + answers + self._simulation(ways, 1) + picks
        return {name: seconds for name, seconds in found.items() if seconds}

    @property
    def seconds(self) -> float:
        """Seconds of all parts."""
        return sum(self.parts.values())

    def tokens(self, most: int | None = None) -> float:
        """Tokens of an answer to every prompt, or to `most` of each slice."""
        spec, answer = self.spec, self.estimate.given.evaluated
        return sum(
            min(count, most or count) * min(answer, spec.max_new_tokens_by_slice.get(name, spec.max_new_tokens))
            for name, count in self.estimate.prompts.items()
        )

    def _round(self, nodes: float, batch: int, itemsize: int | None = None) -> float:
        context = self.estimate.given.prompt + self.estimate.given.evaluated / 2
        return self.estimate.pass_seconds(batch, nodes, context, itemsize or self._itemsize)

    @property
    def _itemsize(self) -> int:
        """Bytes per number of the timed target."""
        return {"auto": self.estimate.target.itemsize, "float32": 4}.get(self.spec.dtype, 2)

    def _token(self, way: Way | None, batch: int, itemsize: int | None = None) -> float:
        """Seconds per token of the target alone (None), or drafted."""
        alone = self._round(1, batch, itemsize) / batch
        if way is None:
            return alone
        return max(alone, self._round(way.nodes, batch, itemsize) / batch / TOKENS_PER_ROUND)

    @property
    def _prefill(self) -> float:
        """Seconds in which one system reads every prompt once."""
        return self.estimate.seconds(self.count * self.estimate.target.forward_flops(self.estimate.given.prompt))

    def _equality(self) -> float:
        """Greedy texts of the target alone and of every way, one prompt at a time in float32, where the timed ones are not exact."""
        if not self.spec.lossless or 0 not in self.spec.temperatures or self._itemsize == 4:
            return 0.0
        ways = (None, *(way for way in self.ways if way.greedy))
        return sum(self.tokens() * self._token(way, 1, 4) + self._prefill for way in ways)

    def _simulation(self, ways: list[Way], repeats: int) -> float:
        """A pass over every distinct text of every way that can be simulated."""
        length = self.estimate.given.prompt + self.tokens() / self.count
        teacher = self.estimate.seconds(self.count * self.estimate.target.forward_flops(length))
        return repeats * teacher * sum(way.simulated for way in ways)

    def _sizes(self, way: Way) -> range:
        return range(2, self.spec.max_k + 2) if way.chain else range(way.nodes, way.nodes + 1)

    def _cost_table(self) -> float:
        """Passes of many sizes at every batch and context that fits in memory, behind prompts that are read anew for every
        drafter."""
        spec, estimate, ways = self.spec, self.estimate, [way for way in self.ways if way.simulated]
        if not spec.plan_batches:
            return 0.0
        given, target = estimate.given, estimate.target
        own = (given.prompt + tokens for tokens in (0, spec.max_new_tokens // 2, spec.max_new_tokens))
        contexts = spec.plan_contexts or list(own)
        largest = max([9, *(size for way in ways for size in self._sizes(way))])
        samplings = len({t > 0 for t in spec.temperatures})
        total = 0.0
        for batch in {*spec.plan_batches, spec.batch}:
            for context in contexts:
                # As `fits_in_memory` has it.
                caches = caches_of(samplings, len(ways)) * target.kv_bytes
                held = batch * (context + 64) * (caches + 8 * target.hidden * self._itemsize)
                if batch > 1 and held > given.device.memory / 2:
                    continue
                # Of every round as many in a row, and one before them.
                rounds = samplings * (1 + IN_A_ROW) * [1, *(way.nodes for way in ways)]
                sizes = [*pass_sizes(batch, largest), *rounds]
                once = sum(estimate.pass_seconds(batch, n, context, self._itemsize) for n in sizes)
                reads = 1 + 2 * len(ways) + samplings * (1 + len(ways))
                read = reads * estimate.seconds(batch * target.forward_flops(context))
                total += read + (1 + 2 * WARM_UP + repeats_within(SECONDS, once)) * once
        return total


def _greedy(draft: DraftSpec, spec: EvaluateSpec) -> bool:
    """Whether a way is measured at temperature 0: lossy rules and drawn children repeat another way there, if there is one."""
    plain = [one for one in spec.drafts if one.acceptance == "lossless" and not one.drawn]
    way = attrgetter("tree", "confidence_threshold", "floors", "window")
    alike = [way(one) for one in plain if one != draft]
    return (draft.acceptance == "lossless" and not draft.drawn) or way(draft) not in alike
