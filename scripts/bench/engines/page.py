"""Renew what README.md, docs/ and heads/formats/served.json say of layouts and engines: python -m scripts.bench.engines.page

A table between `<!-- engines: NAME -->` and `<!-- end -->` is made of the result files of `scripts/test_engines.sh`, one behind
`<!-- table: NAME -->` of the records in heads/formats/.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.heads.export.readme import fenced
from draftsmith.heads.formats.engines import ENGINES, SERVED, Serving
from draftsmith.heads.formats.layout import TARGETS, default_layout, drafts_for, layouts, layouts_of
from scripts.bench.pages import markdown_table

ROOT = Path(__file__).resolve().parents[3]
PAGE, RESULTS = ROOT / "docs" / "engines.md", ROOT / "docs" / "results" / "engines"
PAGES = [
    ROOT / "README.md",
    PAGE,
    *(ROOT / "docs" / f"{name}.md" for name in ("algorithms", "drafters", "export", "train-a-head")),
]
_RECORD = ROOT / "heads" / "formats" / "served.json"
BLOCK = re.compile(r"(<!-- engines: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
METHOD_TITLES = {
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "domino": "Domino",
    "dspark": "DSpark",
    "jetspec": "JetSpec",
    "draft_model": "draft model",
    "eagle1": "EAGLE-1",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "hydra": "Hydra",
    "medusa": "Medusa",
    "mtp": "MTP",
    "xpress": "XPress",
}
SHOWN: dict[str, dict[str, Any]] = {
    **{
        name: {"tokens": 3, "layer_ids": (1, 3, 5)}
        for name in ("dflash", "dflash2", "domino", "dspark", "jetspec", "xpress")
    },
    **{name: {"layer_ids": (1, 3, 5)} for name in ("eagle3", "peagle")},
    **{name: {"tokens": 3, "heads": 3} for name in ("hydra", "medusa")},
}
"""What start lines show of a head, by method: fields of `Serving`, five tokens where none are named."""
KINDS = [
    "Llama",
    "Mistral",
    "Mixtral",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "GptOss",
    "Gemma2",
    "Gemma3",
    "Phi3",
    "SmolLM3",
    "Olmo2",
]
"""Of the classes that were asked about, those that pages show, without ForCausalLM."""
TITLES = {"vllm": "vLLM", "llama.cpp": "llama.cpp"}

Row = dict[str, Any]


def read_results(folder: Path = RESULTS) -> list[Row]:
    """Return the rows of all result files of a folder, each with its target's name and its file's facts."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        facts = {key: found[key] for key in ("command", "commit", "date", "hardware")}
        refused = [row | {"refused": row["why"]} for row in found.get("refused", ())]
        rows += [
            row | {"target": found["target"]["name"], "file": path.name, "facts": facts}
            for row in found["rows"] + refused
        ]
    return sorted(rows, key=lambda row: list(TITLES).index(row["engine"]))


def update(page: str, rows: Sequence[Row]) -> str:
    """Return the page with every table made again."""
    return BLOCK.sub(lambda found: found[1] + RESULT_TABLES[found[2]](rows) + found[3], page)


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
    for row in (row for row in rows if "refused" in row):
        named = (TITLES[row["engine"]], row["version"], row["method"], row["layout"])
        lines.append([*named, "1", "none", "none", "not run", f"**refused**: {row['refused']}"])
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
    """Group the rows of drafts in float32 that were served."""
    groups = defaultdict(list)
    for row in rows:
        if row.get("weights") == "f32":
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
    served = [
        row for row in rows if row["engine"] == "llama.cpp" and "refused" not in row and row["layout"] != "draft_model"
    ]
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
        for call in row.get("close_calls", ())
    ]
    return "".join(f"{line}\n" for line in found) or "None.\n"


RESULT_TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "verified": verified,
    "agreement": agreement,
    "weights": weights,
    "close_calls": close_calls,
    "sources": sources,
}


def agrees(row: Row) -> bool:
    """As `AgreementRow.agrees`; False for what was refused."""
    return "refused" not in row and not row["differences"] and (row["z"] is None or abs(row["z"]) <= 3)


def _tau(counts: Row) -> float:
    return counts["tokens"] / counts["rounds"]


def _sum(rows: Iterable[Row], key: str) -> int:
    return sum(row[key] for row in rows)


def layouts_table() -> str:
    """A row for every layout: its head, and who reads it."""
    rows = []
    for name, layout in layouts().items():
        default = " (default)" if name == default_layout(layout.method) else ""
        readers = ", ".join(ENGINES[engine].title for engine in layout.engines)
        rows.append((f"`{name}`", METHOD_TITLES.get(layout.method, layout.method) + default, readers))
    return markdown_table(("`export.layout`", "head", "read by"), rows)


def rules_table(*, refused: bool) -> str:
    """A row for every thing that is refused, or left out of the README for an engine."""
    rows: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    served = [(layout, engine, one) for layout in layouts().values() for engine, one in layout.engines.items()]
    for layout, engine, rule in ((layout, engine, rule) for layout, engine, one in served for rule in one.rules):
        if layout.refuses(rule) == refused:
            what = re.sub(r"head\.\w+", r"`\g<0>`", rule.what)
            names, engines = rows.setdefault((layout.method, what, rule.why, rule.instead), ([], []))
            names += [f"`{layout.name}`"] * (f"`{layout.name}`" not in names)
            engines += [ENGINES[engine].title] * (ENGINES[engine].title not in engines)
    lines = [
        (", ".join(names), what, f"{' and '.join(engines)}: {why}", instead)
        for (_, what, why, instead), (names, engines) in rows.items()
    ]
    return markdown_table(("layout", "head", "why", "instead"), lines)


def read_by(methods: str) -> str:
    """Return the engines that read layouts of these methods."""
    served = [(e, one) for x in layouts().values() if x.method in methods.split(", ") for e, one in x.engines.items()]
    found = []
    for engine, known in ENGINES.items():
        ends = [one.until for e, one in served if e == engine]
        begins = [one.since for e, one in served if e == engine]
        if ends:
            first = "" if "" in begins else f" from {min(begins)}"
            found.append(known.title + first + ("" if "" in ends else f" up to {max(ends)}"))
    return ", ".join(found)


def engines_table() -> str:
    """A row for every engine: its version, the layouts it was run with, and those of which its source was read alone."""
    rows = []
    for engine, known in ENGINES.items():
        ran: list[str] = []
        read: list[str] = []
        for name, layout in layouts().items():
            if engine in layout.engines:
                (ran if layout.was_run(engine) else read).append(f"`{name}`")
        rows.append((known.title, known.version, ", ".join(ran) or "none", ", ".join(read) or "none"))
    return markdown_table(("engine", "version", "run with heads of the layouts", "read alone, for the layouts"), rows)


def start_lines() -> str:
    """Every engine: its lines for each layout that it reads, and what to watch for."""
    parts = []
    for engine, known in ENGINES.items():
        parts.append(f"### {known.title}\n")
        caveats: dict[str, list[str]] = {}
        for name, layout in layouts().items():
            if engine not in layout.engines:
                continue
            served = layout.engines[engine]
            shown = {"tokens": 5, **SHOWN.get(layout.method, {})}
            serving = Serving(f"export/{name}", "my-org/my-model", **shown)
            parts.append(f"`{name}`:\n")
            for text in fenced(served.start(serving), bash="<!-- needs an engine -->\n"):
                # A file's name stands in the mark that has it written, too.
                parts.append(re.sub(r"^(`(.*\.yaml)`:\n\n)", r"\1<!-- file: \2 -->\n", text))
            for caveat in served.caveats:
                caveats.setdefault(caveat, []).append(f"`{name}`")
        parts += [f"- {', '.join(names)}: {caveat}" for caveat, names in caveats.items()]
        parts += [f"- Counters: {known.counters}.", ""]
    return "\n".join(parts)


def targets_table() -> str:
    """A row for every class of targets: the engines that draft for it."""
    said = {True: "yes", False: "no", None: "not known"}
    rows = [
        (f"`{kind}ForCausalLM`", *(said[drafts_for(engine, "states", [f"{kind}ForCausalLM"])] for engine in TARGETS))
        for kind in KINDS
    ]
    heads = [f"{ENGINES[engine].title} {ENGINES[engine].version}" for engine in TARGETS]
    return markdown_table(("class of the target", *heads), rows)


TABLES = {
    "targets": targets_table,
    "layouts": layouts_table,
    "refused": lambda: rules_table(refused=True),
    "left out": lambda: rules_table(refused=False),
    "engines": engines_table,
    "start": start_lines,
}


def rendered(page: str) -> str:
    """Return a page with its tables and lists of engines as the records and the result files have them."""
    page = update(page, read_results()) if BLOCK.search(page) else page
    ours = "|".join(TABLES)
    page = re.sub(
        rf"(<!-- table: ({ours}) -->\n).*?(<!-- end -->)", lambda m: m[1] + TABLES[m[2]]() + m[3], page, flags=re.DOTALL
    )
    page = re.sub(r"(<!-- read by: (.+?) -->).*?(<!-- end -->)", lambda m: m[1] + read_by(m[2]) + m[3], page)
    # The message about a layout of another method, where a page shows what the command line says.
    return re.sub(
        r"(heads, not (\w+): choose one of )[\w, ]+\.", lambda m: f"{m[1]}{', '.join(layouts_of(m[2]))}.", page
    )


def measured() -> dict[str, dict[str, dict[str, bool]]]:
    """Return engine -> version -> layout -> whether every head of it was served just as we decode, by the committed results of
    scripts/test_engines.sh; transformers serves draft models in tests/heads/draft_model/test_head.py."""
    found: dict[str, Any] = {"transformers": {ENGINES["transformers"].version: {"draft_model": True}}}
    for row in read_results():
        layouts_ = found.setdefault(row["engine"].replace(".", "_"), {}).setdefault(row["version"], {})
        layouts_[row["layout"]] = layouts_.get(row["layout"], True) and agrees(row)
    return found


if __name__ == "__main__":
    _RECORD.write_text(json.dumps(measured(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    SERVED.clear()
    SERVED.update(measured())
    for one in PAGES:
        one.write_text(rendered(one.read_text(encoding="utf-8")), encoding="utf-8")
