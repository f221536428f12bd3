"""An evaluation's decision as files: plan.json, routing.json, and the lines that start each engine with the planned draft.

A folder of an evaluation is read back by `draftsmith report`, also with the costs of another machine.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftsmith.data.embedded import SHIPPED
from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import CostTable, check_fits
from draftsmith.eval.planner.one_evaluation import check_one_evaluation
from draftsmith.eval.planner.plan import Cell, Option, Plan
from draftsmith.eval.planner.routing import Rules, make_rules, no_rules
from draftsmith.eval.planner.verdict import Action, Check, Verdict, clock_faults, decide, make_checks, settled
from draftsmith.eval.results.result import Result
from draftsmith.foreign.records import read_dataclass
from draftsmith.heads.formats.engines import ENGINES, Again, Serving, Snippet, one_gpu, start_vllm_speculators
from draftsmith.heads.formats.layout import default_layout, layouts_of, target_obstacle
from draftsmith.heads.formats.schema import rendered_by
from draftsmith.heads.registry import is_known
from draftsmith.machine import Hardware
from draftsmith.storage import check_ours, write_text
from draftsmith.target.folder import local_folder, read_object
from draftsmith.target.pretrained import DTYPES
from draftsmith.target.target import shortened

HOUR = 3600
MILLION = 10**6
DECISION_MARKS = {"plan.json": r'\A\{\n  "schema_version": .*"verdict": ', "routing.json": r'\A\{\n.*"by_batch": '}
"""How the texts that `write_decision` leaves are known."""


@dataclass(frozen=True)
class Export:
    """What a recipe's section `export` says of the files that engines load: see `ExportSpec`."""

    layout: str | None = None
    dtype: str = "auto"
    tensor_parallel: int = 1

    @classmethod
    def of(cls, section: Any) -> "Export":
        """Return it from a recipe that a result holds. Raises UserError for what is no such section."""
        known = asdict(cls())
        named = {name: section.get(name, known[name]) for name in known} if isinstance(section, Mapping) else section
        export = read_dataclass(cls, named, "the result's recipe, export")
        if export.dtype not in ("auto", *DTYPES):
            raise UserError(
                f"The result's recipe has {export.dtype!r} as export.dtype: evaluate again, or restore the file."
            )
        return export

    def dtype_of(self, result: Result) -> str:
        """Return the dtype of the files, as a result's recipe has it; that of the evaluation where nobody knows the target's."""
        target = (result.recipe or {}).get("target")
        own = target.get("dtype", "auto") if isinstance(target, Mapping) else "auto"
        dtype = own if self.dtype == "auto" else self.dtype
        return result.settings.dtype if dtype == "auto" else dtype

    def holds(self, result: Result, name: str, tokens: int) -> bool:
        """Whether engines draft so from the export of the run's own head: as a chain, without loss, with its own window and weights
        (`name` then says which), and as many tokens as they can."""
        draft, first = result.drafters[name].draft, next(iter(result.drafters))
        own = result.drafters[first].draft
        if draft is None or own is None or name not in (first, own.method, f"{own.method}, {self.dtype_of(result)}"):
            return False
        plain = draft.exported and draft.tree is None and not (draft.lossy or draft.tuned)
        fits = draft.weights in (None, self.dtype_of(result)) and draft.engine_tokens in (None, tokens)
        return plain and fits


@dataclass(frozen=True)
class Decision:
    """What an evaluation decides.

    rules: which requests to speculate for. served: the rules that engines are started with; they take no trees and no weights
    but the export's, so where `rules` are of others these are of the fastest chain that is served. export: how the head is exported.
    price_per_hour: of the machine of the costs, None where nobody said. exports: the folder of the exports. settings: the folder of the engines' start scripts, empty where the page
    alone shows them. again: how the head is exported again.
    """

    plan: Plan
    verdict: Verdict
    rules: Rules
    served: Rules
    checks: tuple[Check, ...]
    export: Export
    price_per_hour: float | None = None
    exports: str = "export"
    settings: str = ""
    again: Again = field(default_factory=Again)

    def cost_per_million(self, cell: Cell, option: Option | None) -> float | None:
        """Return the price of a million answer tokens with a draft, or of the target alone; None without a price."""
        tok_s = cell.alone_tok_s if option is None else cell.tok_s(option)
        return None if self.price_per_hour is None else self.price_per_hour / HOUR / tok_s * MILLION


def make_decision(
    results: Sequence[Result],
    table: CostTable,
    source: str,
    *,
    export: Export | None = None,
    price_per_hour: float | None = None,
    rising: float | None = None,
    heldout: float | None = None,
    one_run: bool = False,
) -> Decision | None:
    """Return what results and costs decide, None where no draft of the table was simulated.

    source: the table's file, for messages. export: None for that of the results' recipe. rising, heldout: see `decide`. one_run: see
    `check_one_evaluation`. Raises UserError where table and results do not belong together.
    """
    check_one_evaluation(results, one_run=one_run)
    results = sorted(results, key=lambda result: result.settings.temperature)
    first = results[0]
    export = export or Export.of((first.recipe or {}).get("export") or {})
    for result in results:
        check_fits(table, source, result)
    plan = Plan(tuple(results), table)
    # A result whose answers all end at once has nothing to plan with.
    plan = Plan(tuple(result for result in results if plan.cell(result) is not None), table)
    if not plan.results:
        return None
    here = table.hardware == first.hardware
    checks = tuple(make_checks(plan))
    verdict = decide(
        plan,
        checks=checks,
        doubts=doubts_of(results, flaws_on=table.hardware) if here else (),
        rising=rising,
        heldout=heldout,
    )
    if verdict is None:
        return None
    verdict = replace(verdict, reasons=(*verdict.reasons, *_unlike_the_costs(export, first)))
    pays = verdict.action in (Action.DEPLOY, Action.CHANGE_K)
    rules = served = (make_rules if pays else no_rules)(plan, verdict.option)
    best = first.drafters[verdict.option.drafter].draft
    tuned = best is not None and best.tuned  # the README of its export starts it
    if pays and not tuned and not export.holds(first, rules.drafter, rules.num_speculative_tokens):
        held = [
            o for o in plan.over_temperatures(plan.batch) if export.holds(first, o.drafter, o.num_speculative_tokens)
        ]
        chains = [o for o in held if plan.paying(o) is not None]
        chain = settled(plan, chains) if chains else None
        served = no_rules(plan, verdict.option) if chain is None else make_rules(plan, chain)
        what = "chains" if rules.tree is not None else "the head as it is exported"
        if best is not None and best.weights not in (None, export.dtype_of(first)):
            what = f"weights in {export.dtype_of(first)}, as the export has them"
        verdict = replace(verdict, reasons=(*verdict.reasons, _instead_of_it(plan, chain, what)))
    return Decision(plan, verdict, rules, served, checks, export, price_per_hour)


def _unlike_the_costs(export: Export, result: Result) -> Iterator[str]:
    """Say what of an export is not that which costs are of."""
    if (gpus := export.tensor_parallel) > 1:
        yield (
            f"The costs are of one device, but {gpus} GPUs are to serve (export.tensor_parallel): a pass and a draft cost something "
            "else there, so measure tokens per second on that server, with and without the draft."
        )
    if (dtype := export.dtype_of(result)) != result.settings.dtype:
        yield f"Costs are of {result.settings.dtype}, but the export and its target are {dtype} (export.dtype, target.dtype)."


def _instead_of_it(plan: Plan, chain: Option | None, what: str) -> str:
    """Say which chain engines are started with, as their start scripts cannot name the best draft. what: they are started with."""
    if chain is None:
        return f"Engines are started with {what}, and no such chain of this head was found to pay: there are no lines that start one."
    gains, timed = plan.gains(chain)
    speeds = ", ".join(
        f"{gain:.2f}x at temperature {r.settings.temperature:g}" for gain, r in zip(gains, plan.results, strict=True)
    )
    return (
        f"Engines are started with {what}: their lines are of {chain.drafter} with {plan.size(chain)}, {speeds} "
        f"({'measured' if timed else 'predicted'})."
    )


def doubts_of(results: Sequence[Result], *, flaws_on: Hardware | None = None) -> list[str]:
    """Return why the times of results should not be quoted, each with its temperature where there are several. flaws_on: the machine
    of a decision, whose flaws (`find_flaws`) are those of its results by which nothing can be decided."""
    several = len(results) > 1
    return [
        f"at T={result.settings.temperature:g} {text}" if several else text
        for result in results
        for text, is_far in clock_faults(result)
        if not (is_far and result.hardware == flaws_on)
    ]


def decision_json(decision: Decision) -> dict[str, Any]:
    """Return the decision as a plain JSON object: verdict, the best draft at every place, and predicted against measured."""
    plan, verdict, machine = decision.plan, decision.verdict, decision.plan.table.hardware
    return {
        "schema_version": 1,
        "verdict": {"action": str(verdict.action), "headline": verdict.headline, "reasons": list(verdict.reasons)},
        "batch": plan.batch,
        "context": plan.context,
        "machine": machine and {"gpu": machine.gpu, "cpu": machine.cpu, "cores": machine.cores},
        "servers": [asdict(server) for server in plan.table.servers],
        "price_per_hour": decision.price_per_hour,
        "places": [
            {
                "temperature": cell.temperature,
                "slice": cell.slice,
                "batch": cell.batch,
                "context": cell.context,
                "target_alone_tok_s": cell.alone_tok_s,
                "target_alone_per_million": decision.cost_per_million(cell, None),
                "pays": cell.pays,
                "best": _option(decision, cell, cell.best),
            }
            for cell in plan.cells()
        ],
        "draft_lengths": [
            {"temperature": cell.temperature, **_option(decision, cell, option)}
            for cell in plan.headline
            for option in cell.options
        ],
        "checks": [{**asdict(check), "holds": check.holds} for check in decision.checks],
    }


def _option(decision: Decision, cell: Cell, option: Option) -> dict[str, Any]:
    return {
        "drafter": option.drafter,
        "num_speculative_tokens": option.num_speculative_tokens,
        "drafted_tokens": decision.plan.table.tokens(option.drafter, option.num_speculative_tokens) - 1,
        "tau": option.tau,
        "tok_s": cell.tok_s(option),
        "speedup": option.speedup,
        "per_million": decision.cost_per_million(cell, option),
    }


_COMMAND = "start.sh"
NAMES = (_COMMAND, "adaptive.json", "trtllm.yaml", "assisted.py")
"""The files that a plan leaves in an engine's folder."""
_SOURCES = {"llama_cpp": "LLAMA_CPP", "tensorrt_llm": "TENSORRT_LLM"}
"""The variables with the folder of sources whose scripts a command runs."""


def engine_settings(decision: Decision) -> dict[str, list[Snippet]]:
    """Return what starts each engine that reads the run's own head, by its name in ENGINES; empty where the decision is to leave
    speculation off, and for what is not served as planned: other heads, windows and weights than an export's, a block of another length,
    lossy drafts, a head that the engine does not compute, and a tuned target, which the export's README starts. Where a tree is fastest
    they are started with the fastest chain.

    The layout is that of the recipe, as far as it holds heads of the method; whether an engine can divide this head over the GPUs is
    for the export to say."""
    rules, export, result = decision.served, decision.export, decision.plan.results[0]
    gpus, dtype, draft = export.tensor_parallel, export.dtype_of(result), result.drafters[rules.drafter].draft
    tokens = rules.num_speculative_tokens
    if not rules.largest_batch or draft is None or not export.holds(result, rules.drafter, tokens):
        return {}
    if not (known := layouts_of(draft.method) if is_known(draft.method) else {}):
        return {}
    layout = known.get(export.layout or "") or known[default_layout(draft.method, result.target.path)]
    target = str(SHIPPED) if result.target.path == "embedded" else result.target.path
    place = local_folder(target)
    # A speculators folder says how many tokens are drafted: as many as the recipe.
    evaluated = (result.recipe or {}).get("evaluate")
    recipe_tokens = evaluated.get("num_speculative_tokens", tokens) if isinstance(evaluated, Mapping) else tokens
    config = {} if place is None else read_object(place / "config.json")
    serving = Serving(
        draft=os.path.join(decision.exports, layout.name),
        target=str(Path(target).absolute()) if Path(target).exists() else target,
        tokens=tokens,
        dtype=dtype,
        gpus=gpus,
        layer_ids=draft.layer_ids,
        heads=draft.num_heads,
        by_batch=rules.by_batch,
        again=decision.again,
        context=shortened(SimpleNamespace(**config)),
        rendered=rendered_by((result.recipe or {}).get("data")),
    )
    return {
        engine: served.start(replace(serving, files=decision.settings and os.path.join(decision.settings, engine)))
        for engine, served in layout.engines.items()
        if f"{layout.name}/{engine}" not in draft.engines_without
        and (served.start is not start_vllm_speculators or tokens == recipe_tokens)
        and target_obstacle(layout, engine, target, config.get("architectures")) is None
        and (gpus == 1 or ENGINES[engine].split is not one_gpu)
    }


def check_decision(option: str, folder: Path) -> None:
    """Raise UserError where a folder holds files that no decision left and one would replace. option: what is about to write it."""
    for name, mark in DECISION_MARKS.items():
        check_ours(option, folder / name, mark)
    settings = [folder / "settings" / engine / name for engine in ENGINES for name in NAMES]
    if any(path.exists() for path in settings) and not (folder / "plan.json").exists():
        raise UserError(
            f"{option} would write into {folder / 'settings'}, which no plan of draftsmith is beside: name another folder with --output."
        )


def remove_decision(folder: Path) -> None:
    """Remove what an earlier decision left in a folder, as it would be taken for that of a page which has none. Files that no decision
    wrote stay."""
    with suppress(UserError):
        check_decision("report", folder)
        _remove_settings(folder / "settings")
        for name in reversed(DECISION_MARKS):  # plan.json, which says whose the others are, goes last
            (folder / name).unlink(missing_ok=True)


def _remove_settings(folder: Path) -> None:
    for engine in ENGINES:
        for name in NAMES:
            (folder / engine / name).unlink(missing_ok=True)
    for left in (*(folder / engine for engine in ENGINES), folder):
        with suppress(OSError):  # not there, or with files of others
            left.rmdir()


def write_settings(folder: Path, decision: Decision) -> None:
    """Write a folder for each engine, with the files and the command that start it, in place of those of an earlier plan. Files of
    other names stay."""
    _remove_settings(folder)
    for engine, snippets in engine_settings(decision).items():
        for snippet in snippets:
            path = folder / engine / (snippet.file or _COMMAND)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = snippet.text
            if not snippet.file:  # commands run in any folder, so a variable names the folder of an engine's scripts
                variable = _SOURCES.get(engine, "")
                text = re.sub(r"^python (?=convert_hf|examples/)", f'python "${variable}"/', text, flags=re.MULTILINE)
                text = text.replace("--gguf llama.cpp", f'--gguf "${variable}"')
                if text != snippet.text:
                    text = f': "${{{variable}:?set it to the folder with its sources}}"\n{text}'
            write_text(path, text)
