"""`draftsmith evaluate --url` and `what-if`: running servers with and without speculation, and how they accept as a better head would."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as TerminalTable

from draftsmith.cli.boundary import put
from draftsmith.cli.commands import COMMANDS
from draftsmith.cli.ledger import read_measures
from draftsmith.errors import UserError, did_you_mean
from draftsmith.eval.clocks.cost_table import CostTable, check_fits, read_cost_table
from draftsmith.eval.engines.comparison import make_level, predictor, rates_for, start_lines
from draftsmith.eval.engines.load import Chat, ChatServer, Limits, take_turns
from draftsmith.eval.report.report import REPORT_MARKS, terminal_cell, write_report
from draftsmith.eval.report.served import notes_of, tables_of
from draftsmith.eval.results.result import Result, Settings, TargetInfo, read_result, write_result
from draftsmith.eval.results.served import Served, ServedAcceptance, ServedServer
from draftsmith.foreign.server import as_asked
from draftsmith.foreign.text import read_json
from draftsmith.machine import command_line, environment
from draftsmith.progress import say
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.evaluation import conversations_of
from draftsmith.stages.session import Session
from draftsmith.storage import check_ours

_MARKS = REPORT_MARKS | {"result.json": r'\A\{\n  "schema_version": .*"drafters": '}
_HERE = ("no_decode", "head", "redo", "launch", "fail_under", "junit")
"""Options of evaluate that are for the decoder here."""
ONLY_SERVED = ("model", "report", "costs", "injected", "seconds", "request_seconds", "output")
"""Those that are for --url."""


def evaluate_served(own: Namespace, words: list[str]) -> int:
    """Let the servers answer the recipe's prompts in turns; write and print what that comes to."""
    if wrong := next((name for name in _HERE if getattr(own, name)), None):
        raise UserError(
            f"--{wrong.replace('_', '-')} is for the decoder here, and --url measures running servers: leave one of them out."
        )
    named = any(word.split("=", 1)[0] in ("--recipe", "--target.path", "--help", "-h") for word in words)
    command, target = COMMANDS["evaluate"], [] if named else ["--target.path", "served"]
    recipe = parse_recipe([*target, *words], "draftsmith evaluate", command.help, command.options)
    session = Session(recipe, words=words)
    chats = list(_chats(session, ignore_end=own.injected))
    wanted = sorted({*recipe.evaluate.plan_batches, recipe.evaluate.batch})
    if over := [str(n) for n in wanted if n > len(chats)]:
        say(
            f"warning: there are {len(chats)} prompts, so {', '.join(over)} at once are left out: give more, or lower evaluate.plan_batches"
        )
    concurrencies = [n for n in wanted if n <= len(chats)]
    report = None if own.report is None else read_result(own.report)
    if report is not None:
        _check_report(report.settings, _settings(recipe), f"--report {own.report}")
    drafters = {} if report is None else report.drafters
    drafter = drafters.get(recipe.method) or next(iter(drafters.values()), None)
    predict = None
    if own.costs is not None:
        costs = _read_costs(own.costs, report)
        predict = predictor(costs, recipe.method, drafter, recipe.evaluate.temperatures[0])
    folder = own.output or Path("served")
    for name, mark in _MARKS.items():
        check_ours("--output", folder / name, mark)
    servers = list[ChatServer]()
    for url in own.url:
        known = [session.target_path] if named else [one.model for one in servers[:1]]
        servers.append(ChatServer(url, own.model or known))
    limits = Limits(own.request_seconds or 60.0, own.seconds or 600.0)
    tallies = take_turns(servers, chats, concurrencies, recipe.evaluate.repeats, limits)
    made = environment()
    served = Served(
        servers=tuple(ServedServer(one.url, one.engine, one.model) for one in servers),
        levels=tuple(make_level(rows, found, predict) for rows, found in tallies.items()),
        temperature=recipe.evaluate.temperatures[0],
        max_tokens=max(chat.body["max_tokens"] for chat in chats),
        prompts=len(chats),
        repeats=recipe.evaluate.repeats,
        injected=own.injected,
        client=made["hardware"],
        command=command_line(),
        commit=made["commit"],
        date=made["date"],
    )
    result = replace(report or _alone(recipe, servers[0].model, served, made), served=served)
    write_result(folder / "result.json", result)
    write_report([result], folder)
    _print(served)
    put(folder / "report.html")
    return 0


def _check_report(reported: Settings, asked: Settings, which: str) -> None:
    """Raise UserError where a report is of another distribution than the servers are asked for."""
    if reported.temperature != asked.temperature:
        raise UserError(
            f"{which} is of temperature {reported.temperature:g}, but evaluate.temperatures begins with {asked.temperature:g}: give the result of "
            "that one."
        )
    different = [name for name, value in asked.filters.items() if reported.filters[name] != value]
    if different and (asked.temperature or "repetition penalty" in different):  # the others filter nothing at 0
        raise UserError(
            f"{which} has another {' and '.join(different)} than is asked for here: give a result of the same, or set it under evaluate."
        )


def _chats(session: Session, *, ignore_end: bool) -> Iterator[Chat]:
    """Yield the recipe's evaluation prompts as requests."""
    spec = session.recipe.evaluate
    if spec.repetition_penalty != 1:
        raise UserError(
            "evaluate.repetition_penalty is no option that servers agree on: leave it at 1, or set it where they are started."
        )
    off = {"top_p": 1, "top_k": 0, "min_p": 0}
    filters = {key: getattr(spec, key) for key in off if getattr(spec, key) != off[key]}
    template = session.recipe.data.template
    standard = (
        {"temperature": spec.temperatures[0]} | filters | ({"chat_template_kwargs": template} if template else {})
    )
    for one in conversations_of(session):
        most = spec.max_new_tokens_by_slice.get(one.slice, spec.max_new_tokens)
        tools = {"tools": list(one.tools)} if one.tools else {}
        end = {"ignore_eos": True} if ignore_end else {}
        yield Chat(one.id, {"messages": [*as_asked(one.prompt())], "max_tokens": most, **standard, **tools, **end})


def _read_costs(path: Path, report: Result | None) -> CostTable | Served:
    """Return a table of costs, or what servers with injected acceptance took. Raises UserError for a file that is neither, and for a
    table that is not of the report's target and drafters."""
    value = read_json(path, "give a table of `draftsmith costs`, or the result.json of `evaluate --url --injected`")
    if not (isinstance(value, dict) and "drafters" in value):
        table = read_cost_table(path)
        if report is not None and report.drafters:  # of no servers alone
            check_fits(table, f"--costs {path}", report)
        return table
    if (served := read_result(path).served) is None:
        raise UserError(
            f"--costs {path} is of no running servers: give a table of `draftsmith costs`, or a result of `evaluate --url`."
        )
    return served


def _alone(recipe: Recipe, model: str, served: Served, made: dict[str, Any]) -> Result:
    """Return a result of nothing but servers."""
    facts = served.command, served.commit, served.date, made["hardware"], made["versions"]
    return Result(*facts, None, TargetInfo(model), _settings(recipe), {})


def _settings(recipe: Recipe) -> Settings:
    spec = recipe.evaluate
    filters = spec.top_k or None, spec.top_p if spec.top_p < 1 else None
    counts = spec.num_speculative_tokens, spec.batch
    return Settings(
        spec.temperatures[0], *filters, *counts, "as served", recipe.seed, spec.repeats, min_p=spec.min_p or None
    )


def _print(served: Served) -> None:
    """Print the first table and the notes."""
    first, shown = tables_of(served)[0], 7
    table = TerminalTable(title="Running servers, the same prompts in turns", title_justify="left")
    for name in first.columns[:shown]:
        table.add_column(name, overflow="fold")
    for row in first.rows:
        table.add_row(*map(terminal_cell, row.cells[:shown]))
    Console().print(table)
    for note in notes_of(served):
        say(note)


def what_if(own: Namespace, words: list[str]) -> int:
    """Print the rates of hypothetical heads, how engines are started with them, and what costs make of them."""
    if words:
        raise UserError(f"what-if takes --tau, --draft-length, --report and --costs, but not {words[0]}.")
    # The shares of rounds that accept each drafted token, which a wanted tau bends, and the tau that they have of a report.
    shape, known, name, heat = [0.5**i for i in range(1, own.draft_length + 1)], None, own.drafter, None
    costs = (
        None if own.costs is None else _read_costs(own.costs, None if own.report is None else read_result(own.report))
    )
    if name is not None and own.report is None and not isinstance(costs, CostTable):
        raise UserError(
            f"--drafter {name} names a drafter of a report or of a table of costs: give it with --report or --costs."
        )
    if name is not None and isinstance(costs, CostTable) and name not in costs.drafters:
        raise UserError(
            f"{own.costs} has no drafter {name!r}{did_you_mean(name, costs.drafters)}: it has {', '.join(costs.drafters)}."
        )
    if own.report is not None:
        name, overall, result = read_measures(own.report, own.drafter)
        heat = result.settings.temperature
        shares = overall.acceptance_at_simulated or overall.acceptance_at or ()
        shape = [share for share in shares[: own.draft_length] if share is not None]
        if len(shape) < own.draft_length:
            raise UserError(
                f"{own.report} tells the acceptance of {len(shape)} drafted tokens of {name}, not of {own.draft_length}: lower --draft-length."
            )
        known = 1 + sum(shape)
    if not own.tau and known is None:
        raise UserError(
            "what-if needs the tau of a head that is not there yet: add --tau 2.5, or --report FILE for that of a result."
        )
    if isinstance(costs, CostTable) and heat is None and not costs.times(0.0):
        heat = costs.temperatures[0]
    predict = None if costs is None else predictor(costs, name or "", None, heat or 0.0)
    for tau in own.tau or [known]:
        rates = rates_for(tau, shape)
        put(
            f"tau {tau:g}, {len(rates)} drafted tokens; rounds that accept token 1, 2, ...: {' '.join(f'{rate:.3f}' for rate in rates)}"
        )
        for engine, line in start_lines(tau, rates).items():
            put(f"  {engine}: {line}")
        if costs is not None and predict is not None:
            accepted = ServedAcceptance(1.0, tau, None, float(len(rates)), rates, False)
            at = costs.batches if isinstance(costs, CostTable) else [level.concurrency for level in costs.levels]
            found = {rows: told[1] for rows in at if (told := predict(rows, accepted))}
            shown = ", ".join(f"{speedup:.2f} at batch {rows}" for rows, speedup in found.items())
            put(f"  predicted speedup: {shown or f'the costs have no rounds of {len(rates)} drafted tokens'}")
    put(
        "Then: draftsmith evaluate --url ALONE --url WITH_DRAFT --injected. Texts are worth nothing while rates are injected."
    )
    return 0
