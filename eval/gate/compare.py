"""Compare two result.json, such as those before and after a new target: what changed, and whether that is beyond noise.

    draftsmith compare OLD NEW

The interval of a change of tau is over pairs: both results on the same resampled prompts. That of other numbers is made from the
intervals of the two, as if they were independent: distances to the ends of both are added in squares (Zou and Donner, Statistics in
Medicine 27, 2008; for shares, whose intervals are Wilson's, Newcombe, Statistics in Medicine 17, 1998). That is too wide: what is
called beyond noise is, a smaller change may be missed. Intervals are 95% over prompts, and of what is timed the range of the repeats;
there is none below 10 prompts, of a single repeat, and of acceptance by position. Drafters of another K (num_speculative_tokens) are
compared by their curves of simulated tau, which hold no intervals.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from draftsmith.errors import UserError
from draftsmith.eval.gate.gate import refuse_served
from draftsmith.eval.results.conditions import sharers
from draftsmith.eval.results.intervals import FEWEST_PROMPTS, Interval, bootstrap_tau
from draftsmith.eval.results.metrics import METRICS, Metric, taus_by_k
from draftsmith.eval.results.result import OVERALL, DrafterResult, Result, TargetInfo

BETTER, WORSE, CHANGED, NOISE, SAME = "better", "worse", "changed", "noise", "same"


@dataclass(frozen=True)
class Difference:
    """One metric on one slice.

    metric: a name of result.json; acceptance_at[0] is that of the first draft position, k_sweep[3] the simulated tau of K = 3.
    interval: of `change`, None where one of the numbers has none. verdict: whether 0 lies outside it: better, worse, or changed for
    the speed of the target alone; noise where it lies inside, same for equal numbers, None without an interval.
    """

    slice: str
    metric: str
    old: float
    new: float
    change: float
    interval: Interval | None
    verdict: str | None


@dataclass(frozen=True)
class DrafterComparison:
    """A drafter of the old result and what it is compared with in the new one. k: draft lengths of both."""

    old: str
    new: str
    k: tuple[int, int]
    differences: tuple[Difference, ...]

    @property
    def name(self) -> str:
        """The drafter's name, or both."""
        return self.old if self.old == self.new else f"{self.old} -> {self.new}"


@dataclass(frozen=True)
class Comparison:
    """old, new: the files. sides: of what run or head each is, when and at which temperature it was measured. notes: what else
    changed, what is left out, and why; sentences without a full stop. lost: the old result's own head, where it is compared with nothing
    and nobody named what to compare."""

    old: str
    new: str
    sides: tuple[str, str]
    notes: tuple[str, ...]
    drafters: tuple[DrafterComparison, ...]
    lost: str | None = None

    @property
    def worse(self) -> list[str]:
        """A sentence for every number that is worse beyond noise."""
        return [
            f"{one.name}: {'' if d.slice == OVERALL else d.slice + '.'}{d.metric} {d.new:.4g} is worse than {d.old:.4g} beyond noise "
            f"({d.interval[0]:+.3g} to {d.interval[1]:+.3g})."
            for one in self.drafters
            for d in one.differences
            if d.verdict == WORSE and d.interval is not None
        ]

    def require_intervals(self) -> None:
        """Raise UserError where nothing could be worse beyond noise, as the overall tau of a drafter has no interval, or the head
        itself is compared with nothing."""
        if self.lost is not None:
            raise UserError(
                f"--fail-if-worse: {self.new} has no {self.lost}, the head of {self.old}, so nothing could tell whether it is worse: name what "
                "belongs together with --drafter OLD=NEW."
            )
        for one in self.drafters:
            taus = [d for d in one.differences if d.slice == OVERALL and d.metric in ("tau", "tau_simulated")]
            if one.k[0] != one.k[1]:
                raise UserError(
                    f"--fail-if-worse: {one.name} drafts {one.k[0]} tokens in {self.old} and {one.k[1]} in {self.new}, and taus of "
                    "other draft lengths have no interval: evaluate both with the same evaluate.num_speculative_tokens."
                )
            if all(d.interval is None for d in taus):
                raise UserError(
                    f"--fail-if-worse: tau of {one.name} has no interval in both {self.old} and {self.new}, so nothing could be worse "
                    f"beyond noise: evaluate at least {FEWEST_PROMPTS} prompts, with this version."
                )


def compare_results(
    old: Result, new: Result, files: tuple[str, str] = ("old", "new"), pairs: Sequence[str] = ()
) -> Comparison:
    """Compare the drafters of two results that `pairs` names, each NAME or OLD=NEW; without pairs those of the same name.

    files: what messages call the two. Raises UserError for results of other settings or prompts, and for a pair that names no
    drafter of each.
    """

    refuse_served(dict(zip(files, (old, new), strict=True)))

    def facts(result: Result) -> dict[str, object]:
        s = result.settings
        return {"temperature": s.temperature, **s.filters, "dtype": s.dtype}

    ours, theirs = facts(old), facts(new)
    unlike = [f"{key} {_shown(ours[key])} and {_shown(theirs[key])}" for key in ours if ours[key] != theirs[key]]
    if unlike:
        raise UserError(
            f"{files[0]} and {files[1]} cannot be compared, as they were measured with other settings: {', '.join(unlike)}; evaluate "
            "one of them again with the settings of the other."
        )
    _refuse_other_prompts(old, new, files)
    names = _match(old, new, files, pairs)
    timed = _machine(old) == _machine(new)
    repeats = (old.settings.repeats, new.settings.repeats)
    drafters = tuple(
        DrafterComparison(a, b, k, tuple(_differences(old.drafters[a], new.drafters[b], k, repeats, timed=timed)))
        for (a, b), k in names.items()
    )
    notes = [*_notes(old, new, names)]
    if all(any(d.overall.decode_tok_s for d in result.drafters.values()) for result in (old, new)):
        if not timed:
            machines = f"{_machine(old)}; {_machine(new)}"
            notes.append(f"speeds are left out, as they are of other machines or batches: {machines}")
        elif min(repeats) > 1:
            notes.append("intervals of speeds are those of the repeats: another load of the machine is not in them")
    head = next(iter(old.drafters))
    lost = None if pairs or any(head == a for a, _ in names) else head
    return Comparison(*files, (_side(old), _side(new)), tuple(notes), drafters, lost)


def _side(result: Result) -> str:
    """Return what a result was measured of, when, and how."""
    recipe, head = result.recipe or {}, re.search(r"--head[ =]('[^']*'|\S+)", result.command)
    run = recipe.get("output_dir") or recipe.get("name")
    of = (head and f"head {head[1]}", run and f"run {run}", result.date[:10])
    return ", ".join([*filter(None, of), f"temperature {result.settings.temperature:g}"])


def _shown(value: object) -> str:
    return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _refuse_other_prompts(old: Result, new: Result, files: tuple[str, str]) -> None:
    """Raise UserError where the prompts, or what they were cut to, are others."""
    a, b = old.settings.prompts, new.settings.prompts
    counts = _prompts_by_slice(old), _prompts_by_slice(new)
    if a == b and counts[0] == counts[1]:
        return
    both = [name for name in dict.fromkeys((*counts[0], *counts[1])) if counts[0].get(name) != counts[1].get(name)]
    shown = "; ".join(f"{name}: {counts[0].get(name, 0)} and {counts[1].get(name, 0)}" for name in both[:5])
    raise UserError(
        f"{files[0]} and {files[1]} were measured on other prompts{f' ({shown})' if shown else ''}: evaluate both with the same "
        "evaluate.prompts, evaluate.per_slice and evaluate.max_new_tokens."
    )


def _prompts_by_slice(result: Result) -> dict[str, int]:
    """Return the number of prompts in each slice, which every drafter of a result has."""
    first = next(iter(result.drafters.values()), None)
    return {} if first is None else {name: measures.prompts for name, measures in first.slices.items()}


def _match(
    old: Result, new: Result, files: tuple[str, str], pairs: Sequence[str]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the drafters to compare, with the draft lengths of both. Raises UserError where there are none, or where other draft lengths
    have no part of their simulated curves in common."""
    names = [_read_pair(text, old, new, files) for text in dict.fromkeys(pairs)]
    if not pairs:
        names = [(name, name) for name in old.drafters if name in new.drafters]
    if not names:
        raise UserError(
            f"No drafter has the same name in both: {files[0]} has {_listed(old)} and {files[1]} has {_listed(new)}; name what "
            "belongs together with --drafter OLD=NEW."
        )
    lengths = {}
    for a, b in names:
        drafts = (old.drafters[a].draft or old.settings, new.drafters[b].draft or new.settings)
        lengths[a, b] = ours, theirs = drafts[0].num_speculative_tokens, drafts[1].num_speculative_tokens
        if ours != theirs and not taus_by_k(old.drafters[a].overall).keys() & taus_by_k(new.drafters[b].overall).keys():
            raise UserError(
                f"{a} drafts {ours} tokens in {files[0]} and {b} {theirs} in {files[1]}, and no draft length was simulated in both: "
                "evaluate both with the same evaluate.num_speculative_tokens."
            )
    return lengths


def _read_pair(text: str, old: Result, new: Result, files: tuple[str, str]) -> tuple[str, str]:
    """Read NAME or OLD=NEW, where a name may hold an equals sign itself."""
    splits = [(text, text), *((text[:i], text[i + 1 :]) for i, sign in enumerate(text) if sign == "=")]
    for a, b in splits:
        if a in old.drafters and b in new.drafters:
            return a, b
    raise UserError(
        f"--drafter {text!r} names no drafter of each result: write NAME or OLD=NEW; {files[0]} has {_listed(old)} and {files[1]} has "
        f"{_listed(new)}."
    )


def _listed(result: Result) -> str:
    return ", ".join(result.drafters) or "none"


def _differences(
    old: DrafterResult, new: DrafterResult, k: tuple[int, int], repeats: tuple[int, int], *, timed: bool
) -> Iterator[Difference]:
    """Yield what both have measured, over all slices and then of each; of another K what does not depend on it."""
    alike = k[0] == k[1]
    scopes = [(OVERALL, old.overall, new.overall)]
    scopes += [(name, measures, new.slices[name]) for name, measures in old.slices.items() if name in new.slices]
    for slice_name, ours, theirs in scopes:
        if not alike:
            after = taus_by_k(theirs)
            for length, tau in taus_by_k(ours).items():
                if length in after:
                    change = after[length] - tau
                    yield Difference(slice_name, f"k_sweep[{length}]", tau, after[length], change, None, None)
        for metric in (one for one in METRICS if one.compared and (alike or not one.of_k)):
            a, b = metric.value(ours), metric.value(theirs)
            if a is not None and b is not None and (timed or not metric.timed):
                ends = metric.interval_of(ours, repeats[0]), metric.interval_of(theirs, repeats[1])
                interval = _paired_interval(metric, old, new, slice_name) or difference_interval(a, b, *ends)
                verdict = _verdict(b - a, interval, metric.sign)
                yield Difference(slice_name, metric.name, a, b, b - a, interval, verdict)
        decoded = ours.acceptance_at, theirs.acceptance_at
        simulated = ours.acceptance_at_simulated, theirs.acceptance_at_simulated
        at, at_new = (decoded if all(decoded) else simulated) if alike else ((), ())
        for place, (a, b) in enumerate(zip(at or (), at_new or (), strict=False)):
            if a is not None and b is not None:
                yield Difference(slice_name, f"acceptance_at[{place}]", a, b, b - a, None, None)


def _paired_interval(metric: Metric, old: DrafterResult, new: DrafterResult, slice_name: str) -> Interval | None:
    """Return the interval of a change of tau on the same prompts, None for other numbers and where a result has no sums of prompts."""
    if not metric.rounds or old.prompts.keys() != new.prompts.keys():
        return None
    names = [name for name, sums in old.prompts.items() if slice_name in (OVERALL, sums.slice)]
    before, after = (
        [(of[name].tokens, getattr(of[name], metric.rounds) or 0.0) for name in names]
        for of in (old.prompts, new.prompts)
    )
    return bootstrap_tau(after, before)


def difference_interval(old: float, new: float, of_old: Interval | None, of_new: Interval | None) -> Interval | None:
    """Return the interval of `new - old` from theirs (see the top of the file), None where one has none."""
    if of_old is None or of_new is None:
        return None
    down = ((new - of_new[0]) ** 2 + (of_old[1] - old) ** 2) ** 0.5
    up = ((of_new[1] - new) ** 2 + (old - of_old[0]) ** 2) ** 0.5
    return new - old - down, new - old + up


def _verdict(change: float, interval: Interval | None, sign: int) -> str | None:
    if interval is None:
        return None
    if change == 0:
        return SAME
    if interval[0] <= 0 <= interval[1]:
        return NOISE
    return CHANGED if not sign else BETTER if change * sign > 0 else WORSE


def _notes(old: Result, new: Result, names: Mapping[tuple[str, str], tuple[int, int]]) -> Iterator[str]:
    """Yield what changed besides the numbers, and what was not compared."""
    if old.target.fingerprint is not None and old.target.fingerprint == new.target.fingerprint:
        yield f"the same target: {new.target.path}"
    else:
        yield f"the target changed: {_identity(old.target)} -> {_identity(new.target)}"
    if versions := [name for name in old.versions if new.versions.get(name, old.versions[name]) != old.versions[name]]:
        yield f"versions changed: {', '.join(f'{n} {old.versions[n]} -> {new.versions[n]}' for n in versions)}"
    for (a, b), (ours, theirs) in names.items():
        before, after = old.drafters[a].draft, new.drafters[b].draft
        if before and after and (unlike := after.unlike(before)):
            yield f"{b} in the new result has {unlike} as in the old one"
        if ours != theirs:
            yield (
                f"{b} drafts {theirs} tokens and not {ours} as in the old result: tau is compared as simulated at the draft lengths that "
                "both hold, without intervals; tau as decoded, its speeds and acceptance by position are left out"
            )
    for result, which, taken in ((old, "old", {a for a, _ in names}), (new, "new", {b for _, b in names})):
        if alone := [name for name in result.drafters if name not in taken]:
            yield f"not compared, in the {which} result: {', '.join(alone)}"
    for text in dict.fromkeys((*old.warnings, *new.warnings)):
        where = " and the ".join(name for name, one in (("old", old), ("new", new)) if text in one.warnings)
        yield f"warning in the {where} result: {text.rstrip('.')}"
    if few := [name for name, count in _prompts_by_slice(new).items() if count < FEWEST_PROMPTS]:
        yield f"fewer than {FEWEST_PROMPTS} prompts, so without an interval: {', '.join(few)}"


def _identity(target: TargetInfo) -> str:
    return f"{target.path} ({(target.fingerprint or 'unknown')[:8]})"


def _machine(result: Result) -> str:
    """Return what speeds depend on besides the models."""
    h, batch = result.hardware, result.settings.batch
    shared = f", {count} processes" if (count := sharers(result.recipe)) > 1 else ""
    return f"{h.gpu or h.cpu}{shared}, {h.cores} cores, {h.threads} threads, batch {batch}"
