"""Renew what README.md, docs/ and heads/formats/served.json say of layouts and engines: python -m scripts.bench.engines.formats"""

import json
import re
from pathlib import Path
from typing import Any

from draftsmith.heads.export.readme import fenced
from draftsmith.heads.formats.engines import ENGINES, SERVED, Serving
from draftsmith.heads.formats.layout import TARGETS, default_layout, drafts_for, layouts, layouts_of
from scripts.bench.engines.page import agrees, read_results
from scripts.bench.pages import markdown_table

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("drafters", "export", "train-a-head"))]
_RECORD = ROOT / "heads" / "formats" / "served.json"

TITLES = {
    "dflash": "DFlash",
    "dspark": "DSpark",
    "draft_model": "draft model",
    "eagle1": "EAGLE-1",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "hydra": "Hydra",
    "medusa": "Medusa",
}
SHOWN: dict[str, dict[str, Any]] = {
    "dflash": {"tokens": 3, "layer_ids": (1, 3, 5)},
    "dspark": {"tokens": 3, "layer_ids": (1, 3, 5)},
    "eagle3": {"layer_ids": (1, 3, 5)},
    "peagle": {"layer_ids": (1, 3, 5)},
    "hydra": {"tokens": 3, "heads": 3},
    "medusa": {"tokens": 3, "heads": 3},
}
"""What start lines show of a head, by method: fields of `Serving`, five tokens where none are named."""
KINDS = (
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
)
"""Of the classes that were asked about, those that pages show, without ForCausalLM."""


def layouts_table() -> str:
    """A row for every layout: its head, and who reads it."""
    rows = []
    for name, layout in layouts().items():
        default = " (default)" if name == default_layout(layout.method) else ""
        readers = ", ".join(ENGINES[engine].title for engine in layout.engines)
        rows.append((f"`{name}`", TITLES.get(layout.method, layout.method) + default, readers))
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
        if ends:
            found.append(known.title + ("" if "" in ends else f" up to {max(ends)}"))
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
    """Return a page with its tables and lists of engines as the records have them."""
    ours = "|".join(TABLES)
    page = re.sub(
        rf"(<!-- table: ({ours}) -->\n).*?(<!-- end -->)", lambda m: m[1] + TABLES[m[2]]() + m[3], page, flags=re.DOTALL
    )
    page = re.sub(r"(<!-- read by: (.+?) -->).*?(<!-- end -->)", lambda m: m[1] + read_by(m[2]) + m[3], page)
    # The message about a layout of another method, where a page shows what the command line says.
    return re.sub(
        r"(heads, not (\w+): choose one of )[\w, ]+\.", lambda m: f"{m[1]}{', '.join(layouts_of(m[2]))}.", page
    )


def measured() -> dict[str, list[str]]:
    """Return the layouts that each engine served just as we decode, by the committed results of scripts/test_engines.sh; transformers
    serves draft models in tests/heads/draft_model/test_head.py."""
    found: dict[str, list[str]] = {"transformers": ["draft_model"]}
    rows = read_results()
    for row in rows:
        engine, layout = row["engine"].replace(".", "_"), row["layout"]
        if all(agrees(one) for one in rows if (one["engine"], one["layout"]) == (row["engine"], layout)):
            found[engine] = sorted({*found.get(engine, []), layout})
    return dict(sorted(found.items()))


if __name__ == "__main__":
    _RECORD.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    SERVED.clear()
    SERVED.update(measured())
    for one in PAGES:
        one.write_text(rendered(one.read_text(encoding="utf-8")), encoding="utf-8")
