"""Render the tables of docs/engines.md from the result files of `scripts/test_engines.sh`.

    python -m scripts.bench.engines.page     # writes them into the page again

A table stands between `<!-- engines: NAME -->` and `<!-- end -->`; a test holds the page against the files.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.pages import markdown_table

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
    groups = _groups(rows, lambda row: (TITLES[row["engine"]], row["version"], row["method"], row["layout"]))
    lines = []
    for key, found in sorted(groups.items()):
        greedy = [row for row in found if row["temperature"] == 0]
        sampled = [row for row in found if row["temperature"] > 0]
        heads = len({(row["head"], row["target"]) for row in found})
        answers = f"{_sum(greedy, 'equal_answers')} of {_sum(greedy, 'answers')}"
        rounds = f"{_sum(greedy, 'equal_rounds'):,} of {sum(row['ours']['rounds'] for row in greedy):,}"
        z = f"{max(abs(row['z']) for row in sampled):.1f}" if sampled else "not run"
        lines.append([*key, str(heads), answers, rounds, z, "yes" if all(agrees(row) for row in found) else "**no**"])
    head = ["engine", "version", "method", "layout", "heads", "equal answers, T=0", "equal rounds, T=0"]
    return markdown_table([*head, "farthest from the simulator, T=1 (standard errors)", "agrees"], lines)


def agreement(rows: Sequence[Row]) -> str:
    """Every head: tau and accepted tokens, simulated, decoded by us, and in the engines."""
    groups = _groups(rows, lambda row: (row["target"], row["head"], row["temperature"], row["drafts"]))
    # A head's rows together, whichever engine served it.
    heads = list(dict.fromkeys(key[:2] for key in groups))
    lines = []
    for key in sorted(groups, key=lambda key: (heads.index(key[:2]), key[2:])):
        found = groups[key]
        target, head, temperature, drafts = key
        first, K = found[0], found[0]["num_speculative_tokens"]
        cells = [target, head, f"{temperature:g}" + (", drawn drafts" if drafts == "sampled" else ""), str(K)]
        error = "" if first["simulated_se"] is None else f" ± {first['simulated_se']:.2f}"
        cells += [f"{first['simulated']:.3f}{error}", _counts(first["decoded"])]
        lines.append([*cells, *(_engine_cell(found, engine) for engine in TITLES)])
    return markdown_table(["target", "head", "T", "K", "simulated", "decoded", *TITLES.values()], lines)


def _groups(rows: Sequence[Row], key: Callable[[Row], tuple[Any, ...]]) -> dict[tuple[Any, ...], list[Row]]:
    """Group the rows of drafts in float32."""
    groups = defaultdict(list)
    for row in rows:
        if row["weights"] == "f32":
            groups[key(row)].append(row)
    return groups


def _engine_cell(rows: Sequence[Row], engine: str) -> str:
    """tau and accepted tokens in an engine, once for layouts that agree; sampled ones with those simulated on their text."""
    texts = dict.fromkeys(
        _counts(row["theirs"]) + (f" (simulated {row['ours']['accepted']:,})" if row["temperature"] else "")
        for row in rows
        if row["engine"] == engine
    )
    return "; ".join(texts) or "—"


def _counts(counts: Row) -> str:
    return f"{_tau(counts):.3f}, {counts['accepted']:,}"


def weights(rows: Sequence[Row]) -> str:
    """llama.cpp with quantized drafts: what they cost in acceptance."""
    lines = []
    served = [row for row in rows if row["engine"] == "llama.cpp" and row["layout"] != "draft_model"]
    for row in served:
        same = [r for r in served if (r["target"], r["head"]) == (row["target"], row["head"])]
        if len(same) < 2:
            continue
        exact = next(r for r in same if r["weights"] == "f32")
        change = _tau(row["theirs"]) / _tau(exact["theirs"]) - 1
        rounds = f"{row['equal_rounds']:,} of {row['ours']['rounds']:,}"
        cells = [row["target"], row["head"], row["weights"], rounds, f"{row['theirs']['accepted']:,}"]
        lines.append([*cells, f"{_tau(row['theirs']):.3f}", f"{change:+.1%}" if row is not exact else ""])
    head = ["target", "head", "draft weights", "rounds as in f32 by us", "accepted", "tau", "change"]
    return markdown_table(head, lines)


def sources(rows: Sequence[Row]) -> str:
    """The result files, and how each was made."""
    lines = []
    for name, facts in {row["file"]: row["facts"] for row in rows}.items():
        cpu = facts["hardware"]["cpu"]
        lines.append(
            [f"[{name}](results/engines/{name})", f"`{facts['command']}`", facts["commit"][:9], facts["date"], cpu]
        )
    return markdown_table(["file", "command", "commit", "date", "processor"], lines)


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


def _tau(counts: Row) -> float:
    return counts["tokens"] / counts["rounds"]


def _sum(rows: Iterable[Row], key: str) -> int:
    return sum(row[key] for row in rows)


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), read_results()), encoding="utf-8")
