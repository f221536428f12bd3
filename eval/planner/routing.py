"""routing.json: which requests are worth speculating for, and with how many drafted tokens, as data and in words.

    draft = route(read_rules("routing.json"), max_tokens=256, temperature=0.7, batch=12, slice_name="code")

Engines start with one draft length; a gateway before two of them, one with and one without a head, needs to know where a request
belongs. K: num_speculative_tokens, 0 for none.
"""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.eval.planner.plan import Option, Plan, break_even_tokens, by_batch
from draftsmith.eval.results.result import OVERALL
from draftsmith.foreign.records import read_current
from draftsmith.foreign.text import read_json
from draftsmith.heads.formats.engines import steps_in_words


@dataclass(frozen=True)
class Rules:
    """What to speculate for.

    drafter: its name in the results. num_speculative_tokens: K of the engine's start, the most that a request may get. by_batch:
    (first, last batch, K), the last one open to the top where its K is 0. largest_temperature: above it speculation was slower, or
    was not measured. smallest_max_tokens: below it an answer is over before its prompt's draft is paid for. slices: K by slice, 0
    where speculation is slower. tree: the name of the tree that is drafted, whose K are its levels; null for a chain.
    """

    drafter: str
    num_speculative_tokens: int
    by_batch: tuple[tuple[int, int, int], ...]
    largest_temperature: float | None
    smallest_max_tokens: int
    slices: dict[str, int]
    tree: str | None = None
    schema_version: int = 2

    @property
    def largest_batch(self) -> int:
        """The largest batch that was planned for and pays, 0 for none."""
        return max((last for _, last, k in self.by_batch if k), default=0)


@dataclass(frozen=True)
class Route:
    """Where a request goes: K drafted tokens a round (levels of a tree), 0 for the target alone, and why."""

    num_speculative_tokens: int
    why: str


def no_rules(plan: Plan, option: Option) -> Rules:
    """Return the rules that leave speculation off."""
    steps, slices = ((1, plan.table.batches[-1], 0),), dict.fromkeys(plan.slices[1:], 0)
    return Rules(option.drafter, option.num_speculative_tokens, steps, None, 0, slices, plan.tree(option))


def make_rules(plan: Plan, option: Option) -> Rules:
    """Return the rules for one draft that pays at the plan's own batch and context, where a rule is not about these.

    Only the temperatures at which it pays count, from the lowest up to the first where it does not.
    """
    if (paying := plan.paying(option)) is None:
        return no_rules(plan, option)
    plan = paying
    slices = {}
    for slice_name in plan.slices[1:]:
        if drafts := plan.served_with(option, plan.batch, slice_name):
            # No engine drafts fewer tokens for one request than it was started with.
            pays = min(plan.gains(option, slice_name)[0]) >= 1
            slices[slice_name] = drafts[0].num_speculative_tokens if pays else 0
    return Rules(
        drafter=option.drafter,
        num_speculative_tokens=option.num_speculative_tokens,
        by_batch=tuple(by_batch(plan, option)),
        largest_temperature=max(r.settings.temperature for r in plan.results),
        smallest_max_tokens=break_even_tokens(plan, option) or 0,
        slices=slices,
        tree=plan.tree(option),
    )


def route(
    rules: Rules, *, temperature: float, max_tokens: int | None = None, batch: int = 1, slice_name: str | None = None
) -> Route:
    """Return how many tokens to draft for a request, and why.

    Args:
        rules: what `read_rules` returns.
        temperature: what the request samples at.
        max_tokens: the most that the answer may have; None for no limit.
        batch: requests that are decoded together, this one included.
        slice_name: what kind of request it is; None where nobody knows.

    Raises:
        UserError: nobody measured the slice.
    """
    if slice_name is not None and slice_name not in rules.slices:
        raise UserError(
            f"The slice {slice_name!r} was not measured: the rules know {', '.join(rules.slices) or 'none'}; leave it out for a "
            "request of another kind."
        )
    if rules.largest_temperature is None or temperature > rules.largest_temperature:
        limit = "at no temperature" if rules.largest_temperature is None else f"up to {rules.largest_temperature:g}"
        return Route(0, f"temperature {temperature:g}: it was measured to pay {limit}")
    if max_tokens is not None and max_tokens < rules.smallest_max_tokens:
        return Route(0, f"an answer of at most {max_tokens} tokens ends before its first draft pays")
    here = next((k for first, last, k in rules.by_batch if first <= batch <= last), 0)
    if here == 0:
        return Route(0, f"batch {batch}: the target alone is faster, or so large a batch was not measured")
    if slice_name is not None and rules.slices[slice_name] < here:
        k = rules.slices[slice_name]
        return Route(
            k, f"slice {slice_name}: {'the target alone is faster' if k == 0 else 'later tokens are not accepted'}"
        )
    return Route(here, f"batch {batch}")


def describe_rules(rules: Rules) -> list[str]:
    """Return the rules in words, a sentence each."""
    if not rules.largest_batch or rules.largest_temperature is None:
        return ["Leave speculation off: the target alone is faster."]
    what = "drafted tokens" if rules.tree is None else "levels of its tree"
    lines = [
        f"Speculate with {rules.drafter} and up to {rules.num_speculative_tokens} {what}, at temperatures up to "
        f"{rules.largest_temperature:g}."
    ]
    lines.append(f"{what.capitalize()} by batch: {steps_in_words(rules.by_batch)}.")
    if rules.smallest_max_tokens > 2:
        lines.append(f"Not for requests of fewer than {rules.smallest_max_tokens} tokens.")
    off = [name for name, k in rules.slices.items() if k == 0]
    if off:
        lines.append(f"Not for {', '.join(off)}.")
    fewer = [f"{k} for {name}" for name, k in rules.slices.items() if 0 < k < rules.num_speculative_tokens]
    if fewer:
        lines.append(f"Fewer drafted tokens are faster on some slices: {', '.join(fewer)}.")
    return lines


def read_rules(path: str | Path) -> Rules:
    """Read and check the rules of an evaluation.

    Args:
        path: its routing.json.

    Raises:
        UserError: a key is wrong; the sentence names it.
    """
    value = read_json(path, "give the path of a routing.json that an evaluation wrote")
    rules = read_current(Rules, value, str(path), "evaluate again with this version")
    lengths = [rules.num_speculative_tokens, *rules.slices.values(), *(k for *_, k in rules.by_batch)]
    if min(lengths) < 0 or OVERALL in rules.slices:
        raise UserError(f"{path} holds a negative number of drafted tokens or a slice named {OVERALL}: evaluate again.")
    return rules
