"""Render docs/results/drafters/README.md, the page of the comparison of drafters, from the result files beside it.

findings.md beside them, where there is one, says what the tables show and comes first on the page.
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template

from draftsmith.files import write_text
from scripts.bench.pages.tables import markdown_table

LENGTHS = ("3", "5", "7")
Entry = dict[str, Any]
TEMPLATE = Path(__file__).with_name("page.md.jinja")


def write_page(folder: Path, order: Sequence[str]) -> Path:
    """Write the page of a folder of result files, in this order of their names; return its path."""
    write_text(folder / "README.md", render(folder, order))
    return folder / "README.md"


def render(folder: Path, order: Sequence[str]) -> str:
    """Return the page; drafters without a result file are left out."""
    entries = read_entries(folder, order)
    findings = folder / "findings.md"
    said = findings.read_text(encoding="utf-8").strip() if findings.exists() else ""
    tables = {}
    if entries:
        tables = {"Overview": overview(entries) + _exceptions(entries)}
        if len(entries) > 1:
            tables[f"Compared with {entries[0]['name']}"] = compared(entries)
        tables |= {"tau per slice": slices(entries), "Learning rates": rates(entries), "Files": files(entries)}
    template = Template(TEMPLATE.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True)
    return template.render(findings=said, tables={title: table.rstrip() for title, table in tables.items()})


def read_entries(folder: Path, order: Sequence[str]) -> list[Entry]:
    """Return what the result files of a folder hold, in this order of their names; those of another name come last. "row" is
    the run of each that the tables show: on the answers that most drafters learned from, where it has one on them."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    common = common_answers(found)
    for entry in found:
        entry["row"] = best_run(entry["runs"], common)
    rank = {name: place for place, name in enumerate(order)}
    return sorted(found, key=lambda entry: (rank.get(entry["name"], len(rank)), entry["name"]))


def answers_of(run: dict[str, Any]) -> str | None:
    """Return what identifies the answers that a run learned from."""
    return run["training"].get("answers")


def common_answers(entries: Sequence[Entry]) -> list[str | None]:
    """Return the set of answers that most drafters have learned from, of several the newest; none where there are no runs."""
    runs = [run for entry in entries for run in entry["runs"]]
    if not runs:
        return []

    def rank(texts: str | None) -> tuple[int, str]:
        drafters = sum(any(answers_of(run) == texts for run in entry["runs"]) for entry in entries)
        return drafters, max(run["date"] for run in runs if answers_of(run) == texts)

    return [max({answers_of(run) for run in runs}, key=rank)]


def best_run(runs: Sequence[dict[str, Any]], among: Collection[str | None] = ()) -> dict[str, Any]:
    """Return the run with the longest tau on held-out answers, which a single run need not have. Two sets of answers have
    different held-out texts, so only runs on the sets `among` are compared, or else those on the newest run's set."""
    newest = max(runs, key=lambda run: run["date"])
    alike = [run for run in runs if answers_of(run) in among]
    alike = alike or [run for run in runs if answers_of(run) == answers_of(newest)]
    return max(alike, key=lambda run: run.get("heldout_tau", 0.0))


def _exceptions(entries: Sequence[Entry]) -> str:
    """Name the drafters that do not compare like for like with the first one, and why."""
    reasons: dict[str, Callable[[Entry], Any]] = {
        "Trained on another number of tokens than": lambda entry: entry["budget"],
        "Trained on other answers of the target than": lambda entry: answers_of(entry["row"]),
        "Measured on other prompts than": lambda entry: entry["row"]["inputs"],
    }
    found = ""
    for reason, of in reasons.items():
        odd = [entry["name"] for entry in entries if of(entry) != of(entries[0])]
        if odd:
            found += f"\n**{reason} {entries[0]['name']}: {', '.join(odd)}.**\n"
    return found


def _compared_at(run: dict[str, Any]) -> str:
    """Return the draft length at which a run is compared with others: 5, or its maximum draft length."""
    found = next(iter(run["simulated"].values()))["tau"]
    return "5" if "5" in found else max(found, key=int)


def _decoded(entry: Entry) -> Entry:
    """Return what decoding measured, by temperature; nothing where that was with another head than the tables show."""
    decoded = entry["decoded"]
    return decoded["at"] if decoded and decoded["head"] == entry["row"]["head"] else {}


def overview(entries: Sequence[Entry]) -> str:
    """A row per drafter: size, training, cost, tau at both temperatures, measured speedup."""
    temperatures = _temperatures(entries)
    head = ["drafter", "trained parameters", "training", "own K", "ms per draft", "target ms"]
    for t in temperatures:
        head += [f"tau T={t}, K 5", f"tau T={t}, own K", f"decoded T={t}", f"speedup T={t}"]
    lines = []
    for entry in entries:
        run, decoded = entry["row"], _decoded(entry)
        some: Entry = next(iter(decoded.values()), {})
        cells = [_name(entry, run), f"{run['parameters'] / 1e6:.2f}M", _minutes(run["training"]["seconds"])]
        cells += [str(run["K"]), _number(some.get("draft_ms")), _number(some.get("target_ms"))]
        for t in temperatures:
            at = decoded.get(t, {})
            cells += [_tau(run, t, 5), _tau(run, t, run["K"]), _number(at.get("tau")), _speedup(at)]
        lines.append(cells)
    greedy = {entry["name"]: _decoded(entry).get("0", {}) for entry in entries}
    texts = [f"{name} {at['equal']} of {at['checked']}" for name, at in greedy.items() if at.get("checked")]
    equal = f"\nGreedy texts that equal those of the target alone: {', '.join(texts)}.\n" if texts else ""
    return markdown_table(head, lines) + equal


def compared(entries: Sequence[Entry]) -> str:
    """tau relative to that of the first drafter at K 5 (or a shorter maximum draft length), with its interval. Prompts are
    drawn for both alike, so that the interval is narrower than the two drafters' own. A drafter is compared with the first
    one's run on the same set of answers, where there is one."""
    temperatures = _temperatures(entries)
    lines = []
    for entry in entries[1:]:
        run = entry["row"]
        cells = [_name(entry, run), _compared_at(run)]
        key = (answers_of(run), run["inputs"])
        alike = [one for one in entries[0]["runs"] if (answers_of(one), one["inputs"]) == key]
        first = best_run(alike)["simulated"] if alike else {}
        for t in temperatures:
            pair = (run["simulated"].get(t), first.get(t))
            cells.append(_ratio(pair[0]["prompts"], pair[1]["prompts"]) if pair[0] and pair[1] else "–")
        lines.append(cells)
    ours = f"{entries[0]['name']}'s at K {_compared_at(entries[0]['row'])}"
    return markdown_table(["drafter", "K", *(f"tau over {ours}, T={t}" for t in temperatures)], lines)


def _ratio(theirs: Entry, ours: Entry, draws: int = 2000) -> str:
    """Return the ratio of two tau and its 95% interval over prompts."""
    counts = np.array([theirs["tokens"], theirs["rounds"], ours["tokens"], ours["rounds"]])
    picks = np.random.default_rng(0).integers(0, counts.shape[1], (draws, counts.shape[1]))
    sums, whole = counts[:, picks].sum(2), counts.sum(1)
    if not (whole > 0).all() or not (sums > 0).all():
        return "–"
    low, high = np.percentile(sums[0] / sums[1] / (sums[2] / sums[3]), [2.5, 97.5])
    value = whole[0] / whole[1] / (whole[2] / whole[3])
    return f"{value - 1:+.1%} [{low - 1:+.1%}, {high - 1:+.1%}]"


def slices(entries: Sequence[Entry]) -> str:
    """A row per drafter, temperature and K."""
    measured = [at["tau"].values() for entry in entries for run in entry["runs"] for at in run["simulated"].values()]
    names = sorted({name for lengths in measured for scopes in lengths for name in scopes} - {"overall"})
    lines = []
    for entry in entries:
        run = entry["row"]
        for t, found in run["simulated"].items():
            for k in sorted({*LENGTHS, str(run["K"])}, key=int):
                scopes = found["tau"].get(k)
                if scopes is not None:
                    cells = [_number((scopes.get(name) or {}).get("value")) for name in names]
                    lines.append([_name(entry, run), t, k, *cells, _interval(scopes["overall"])])
    return markdown_table(["drafter", "T", "K", *names, "overall"], lines)


def rates(entries: Sequence[Entry]) -> str:
    """A row per training."""
    temperatures = _temperatures(entries)
    head = ["run", "learning rate", "Muon's", "steps", "tokens a step", "tokens", "supervised"]
    head += ["head of step", "answers", "training", "held-out tau"]
    lines = []
    # The sets of answers, in the order of the table.
    sets = list(dict.fromkeys(answers_of(run) for entry in entries for run in entry["runs"]))
    for entry in entries:
        for run in entry["runs"]:
            one = run["training"]
            muon = "" if one["muon_lr"] is None else f"{one['muon_lr']:g}"
            cells = [one["name"], f"{one['lr']:g}", muon, f"{one['steps']:,}"]
            cells += [f"{one['tokens'] / max(1, one['steps']):,.0f}", f"{one['tokens'] / 1e6:.2f}M"]
            cells += [f"{one['supervised_tokens'] / 1e6:.2f}M", f"{one.get('head_step') or one['steps']:,}"]
            cells += [f"set {sets.index(answers_of(run)) + 1}", _minutes(one["seconds"])]
            cells.append(_number(run.get("heldout_tau")))
            lines.append(cells + [_tau(run, t, 5) for t in temperatures])
    return markdown_table([*head, *(f"tau T={t}, K 5" for t in temperatures)], lines)


def files(entries: Sequence[Entry]) -> str:
    """How every file was made."""
    lines = []
    for entry in entries:
        made = [*entry["runs"], *([entry["decoded"]] if entry["decoded"] else [])]
        last = max(made, key=lambda one: one["date"])
        processor = f"{last['hardware']['gpu'] or last['hardware']['cpu']}, {last['hardware']['threads']} thread(s)"
        recipe = f"`{entry['recipe']}`" if entry["recipe"] else entry["row"]["training"]["settings"]["trainer"]
        name = f"{entry['name']}.json"
        commit = (last["commit"] or "–")[:9]
        lines.append([f"[{name}]({name})", recipe, f"`{last['command']}`", commit, last["date"], processor])
    return markdown_table(["file", "trained by", "last command", "commit", "date", "processor"], lines)


def _temperatures(entries: Sequence[Entry]) -> list[str]:
    return sorted({t for entry in entries for run in entry["runs"] for t in run["simulated"]}, key=float)


def _name(entry: Entry, run: Entry) -> str:
    return entry["name"] + (" (tuned target)" if run["tuned"] else "")


def _tau(run: Entry, temperature: str, k: int) -> str:
    """Return a run's simulated tau of all slices, a dash where it has none at this temperature and draft length."""
    scopes = run["simulated"].get(temperature, {}).get("tau", {}).get(str(k))
    return "–" if scopes is None else _interval(scopes["overall"])


def _interval(found: Entry) -> str:
    value, interval = found["value"], found["interval"]
    if value is None:
        return "–"
    return f"{value:.2f}" + ("" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _speedup(at: Entry) -> str:
    value, spread = at.get("speedup"), at.get("speedup_spread")
    if value is None:
        return "–"
    if spread is None or at["repeats"] < 2:
        return f"{value:.2f}×, once"
    return f"{value:.2f}× ({spread[0]:.2f} to {spread[1]:.2f})"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
