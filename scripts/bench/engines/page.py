"""The tables of docs/engines.md, from the result files of `scripts/test_engines.sh`.

    python -m scripts.bench.engines.page     # writes them into the page again

A table stands between `<!-- engines: NAME -->` and `<!-- end -->`; a test holds the page against the files.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PAGE, RESULTS = ROOT / "docs" / "engines.md", ROOT / "docs" / "results" / "engines"
BLOCK = re.compile(r"(<!-- engines: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TITLES = {"vllm": "vLLM", "llama.cpp": "llama.cpp"}

Row = dict[str, Any]


def read_results(folder: Path = RESULTS) -> list[Row]:
    """Return the rows of all result files of a folder, each with its target's name and its file's facts."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        facts = {key: found[key] for key in ("command", "commit", "date", "hardware")}
        rows += [row | {"target": found["target"]["name"], "file": path.name, "facts": facts} for row in found["rows"]]
    return sorted(rows, key=lambda row: list(TITLES).index(row["engine"]))


def update(page: str, rows: Sequence[Row]) -> str:
    """Return the page with every table made again."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]](rows) + found[3], page)


def verified(rows: Sequence[Row]) -> str:
    """Engine x version x method x layout: what agreed."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["weights"] == "f32":
            key: tuple[Any, ...] = (TITLES[row["engine"]], row["version"], row["method"], row["layout"])
            groups.setdefault(key, []).append(row)
    lines = []
    for key in sorted(groups):
        found = groups[key]
        greedy = [row for row in found if row["temperature"] == 0]
        sampled = [row for row in found if row["temperature"] > 0]
        heads = len({(row["head"], row["target"]) for row in found})
        answers = f"{_sum(greedy, 'equal_answers')} of {_sum(greedy, 'answers')}"
        rounds = f"{_sum(greedy, 'equal_rounds'):,} of {sum(row['ours']['rounds'] for row in greedy):,}"
        z = f"{max(abs(row['z']) for row in sampled):.1f}" if sampled else "not run"
        lines.append([*key, str(heads), answers, rounds, z, "yes" if all(agrees(row) for row in found) else "**no**"])
    head = ["engine", "version", "method", "layout", "heads", "equal answers, T=0", "equal rounds, T=0"]
    return _table([*head, "farthest from the simulator, T=1 (standard errors)", "agrees"], lines)


def agreement(rows: Sequence[Row]) -> str:
    """Every head: tau and accepted tokens, simulated, decoded by us, and in the engines."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["weights"] == "f32":
            groups.setdefault((row["target"], row["head"], row["temperature"], row["drafts"]), []).append(row)
    # A head's rows together, whichever engine served it.
    heads = list(dict.fromkeys(key[:2] for key in groups))
    lines = []
    for key in sorted(groups, key=lambda key: (heads.index(key[:2]), key[2:])):
        found = groups[key]
        target, head, temperature, drafts = key
        first, K = found[0], found[0]["num_speculative_tokens"]
        cells = [target, head, f"{temperature:g}" + (", drawn drafts" if drafts == "sampled" else ""), str(K)]
        error = "" if first["simulated_se"] is None else f" ± {first['simulated_se']:.2f}"
        cells += [_number(first["simulated"]) + error, _counts(first["decoded"])]
        lines.append([*cells, *(_engine_cell(found, engine) for engine in TITLES)])
    return _table(["target", "head", "T", "K", "simulated", "decoded", *TITLES.values()], lines)


def _engine_cell(rows: Sequence[Row], engine: str) -> str:
    """tau and accepted tokens in an engine, once for layouts that give the same; sampled ones with what the simulator says of
    the same text."""
    texts = dict.fromkeys(
        _counts(row["theirs"]) + (f" (simulated {row['ours']['accepted']:,})" if row["temperature"] else "")
        for row in rows
        if row["engine"] == engine
    )
    return "; ".join(texts) or "—"


def _counts(counts: Row) -> str:
    return f"{_number(_ratio(counts))}, {counts['accepted']:,}"


def weights(rows: Sequence[Row]) -> str:
    """llama.cpp with quantized drafts: what they cost in acceptance."""
    lines = []
    for row in rows:
        if row["engine"] == "llama.cpp" and row["layout"] != "draft_model":
            same = [
                r for r in rows if (r["target"], r["head"], r["engine"]) == (row["target"], row["head"], "llama.cpp")
            ]
            if len(same) < 2:
                continue
            exact = next(r for r in same if r["weights"] == "f32")
            change = _ratio(row["theirs"]) / _ratio(exact["theirs"]) - 1
            rounds = f"{row['equal_rounds']:,} of {row['ours']['rounds']:,}"
            cells = [row["target"], row["head"], row["weights"], rounds, f"{row['theirs']['accepted']:,}"]
            lines.append([*cells, _tau(row["theirs"]), f"{change:+.1%}" if row is not exact else ""])
    return _table(["target", "head", "draft weights", "rounds as in f32 by us", "accepted", "tau", "change"], lines)


def sources(rows: Sequence[Row]) -> str:
    """The result files, and how each was made."""
    lines = []
    for name in dict.fromkeys(row["file"] for row in rows):
        facts = next(row["facts"] for row in rows if row["file"] == name)
        cpu = facts["hardware"]["cpu"]
        lines.append(
            [f"[{name}](results/engines/{name})", f"`{facts['command']}`", facts["commit"][:9], facts["date"], cpu]
        )
    return _table(["file", "command", "commit", "date", "processor"], lines)


def close_calls(rows: Sequence[Row]) -> str:
    """First divergences between logits that are closer than 1e-4."""
    found = [
        f"- {row['target']}, {row['head']}, {TITLES[row['engine']]}: {call}"
        for row in rows
        for call in row["close_calls"]
    ]
    return "".join(f"{line}\n" for line in found) or "None.\n"


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "verified": verified,
    "agreement": agreement,
    "weights": weights,
    "close_calls": close_calls,
    "sources": sources,
}


def agrees(row: Row) -> bool:
    """As `AgreementRow.agrees`."""
    return not row["differences"] and (row["z"] is None or abs(row["z"]) <= 3)


def _ratio(counts: Row) -> float:
    return counts["tokens"] / counts["rounds"]


def _tau(counts: Row) -> str:
    return _number(_ratio(counts))


def _number(value: float) -> str:
    return f"{value:.3f}"


def _sum(rows: Iterable[Row], key: str) -> int:
    return sum(row[key] for row in rows)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def main() -> int:
    """Write the tables into the page again."""
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), read_results()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
