"""What each command of the command line takes and does. Nothing slow is imported before a command's words are read."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli import launching
from draftsmith.errors import UserError
from draftsmith.recipe.options import Option, number, option, require_recipe, take_options, whole_number
from draftsmith.stages.options import CONVERTER_TYPES, GgufOptions, TreeOptions, read_nodes, read_temperature

if TYPE_CHECKING:
    from draftsmith.recipe.schema import Recipe
    from draftsmith.stages.session import Session


@dataclass(frozen=True)
class Command:
    """help: what it does, for the list of commands. run: carries it out, given the values of its options and the words of
    the recipe. options: what it takes beside a recipe; takes_recipe: whether it takes one."""

    help: str
    run: Callable[[Namespace, list[str]], int]
    options: tuple[Option, ...] = ()
    takes_recipe: bool = True


def _session(name: str, words: list[str], redo: list[str], *, made: str = "") -> "Session":
    """Return the session of a command's recipe. made: the command by the stages that it makes, its name if left out."""
    from draftsmith.stages.run import check_redo, check_stage_names

    check_stage_names(redo)
    # A mistake in the recipe is told before the slow imports.
    recipe = _recipe(name, words)
    check_redo(redo, made or name, recipe)
    from draftsmith.stages.session import Session

    return Session(recipe, redo=set(redo))


def _recipe(name: str, words: list[str], example: str = "recipes/eagle3/tiny.yaml") -> "Recipe":
    require_recipe(words, name, example)
    from draftsmith.recipe.parse import parse_recipe

    return parse_recipe(words, f"draftsmith {name}", COMMANDS[name].help, COMMANDS[name].options)


def _run(own: Namespace, words: list[str]) -> int:
    from draftsmith.eval.measure.gate import parse_thresholds

    thresholds = parse_thresholds(own.fail_under)
    session = _session("run", words, own.redo)
    from draftsmith.stages.evaluation import gate
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import check_thresholds, preflight

    if own.launch:
        launching.check_config(session.recipe.train, own.launch)
    lineup = preflight(session, "run")
    check_thresholds(session, thresholds, lineup, decode=True)
    if own.launch:
        launching.train(session, own.launch, words)
    made = make_stages(session, "run", show=_show)
    folder = session.recipe.run_dir / "evaluation"
    print(f"\nreport  {folder / 'report.html'}")
    for temperature in session.recipe.evaluate.temperatures:
        print(f"result  {folder / f't{temperature:g}' / 'result.json'}")
    print(f"export  {made.export or 'none: no layout holds such heads'}")
    return gate(made.results, thresholds)


def _regenerate(own: Namespace, words: list[str]) -> int:
    from draftsmith.stages.pipeline import make_stages

    path = make_stages(_session("regenerate", words, own.redo), "regenerate").answers
    if path is None:
        raise UserError("answers.regenerate is false in this recipe: set it to true to let the target answer.")
    print(path)
    return 0


def _extract(own: Namespace, words: list[str]) -> int:
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import preflight

    session = _session("extract", words, own.redo)
    if session.recipe.features.source == "online":
        raise UserError("features.source is online in this recipe, so nothing is stored: set it to store.")
    preflight(session, "extract")
    make_stages(session, "extract")
    print(session.recipe.data_path / "features")
    return 0


def _train(own: Namespace, words: list[str]) -> int:
    session = _session("train", words, own.redo)
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import preflight

    if own.launch:
        launching.check_config(session.recipe.train, own.launch)
    preflight(session, "train")
    if own.launch:
        launching.train(session, own.launch, words)
    print(make_stages(session, "train").head)
    return 0


def _evaluate(own: Namespace, words: list[str]) -> int:
    from draftsmith.eval.measure.gate import parse_thresholds

    thresholds, made = parse_thresholds(own.fail_under), "evaluate --no-decode" if own.no_decode else "evaluate"
    session = _session("evaluate", words, own.redo, made=made)
    from draftsmith.stages.evaluation import gate
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import check_thresholds, preflight

    check_thresholds(session, thresholds, preflight(session, "evaluate", own.head), decode=not own.no_decode)
    results = make_stages(session, made, head=own.head, show=_show).results
    for path in results:
        print(path)
    return gate(results, thresholds)


def _show(results: list[Path]) -> None:
    """Print the headline table of result files."""
    from rich.console import Console

    from draftsmith.eval.measure.result import read_result
    from draftsmith.eval.report.report import headline_table

    Console().print(headline_table([read_result(path) for path in results]))


def _search_tree(own: Namespace, words: list[str]) -> int:
    if take_options(words, [_REDO])[0].redo:
        raise UserError("search-tree makes no stage of a recipe: leave --redo out, a tree is searched every time.")
    options = TreeOptions(own.nodes, own.temperature, own.output, own.head)
    session = _session("search-tree", words, [])
    from draftsmith.stages.tree_search import search_tree

    print(search_tree(session, options))
    return 0


def _export(own: Namespace, words: list[str]) -> int:
    gguf = GgufOptions.asked(own.gguf, own.gguf_type, own.gguf_pre)
    session = _session("export", words, own.redo)
    from draftsmith.stages.gguf import check_options, export_gguf
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import preflight

    preflight(session, "export", own.head)
    if gguf:
        check_options(session, gguf, own.head)
    exported = make_stages(session, "export", head=own.head).export
    assert exported is not None
    print(export_gguf(session, exported, gguf) if gguf else exported)
    return 0


def _report(own: Namespace, words: list[str]) -> int:
    from draftsmith.eval.measure.gate import parse_thresholds
    from draftsmith.eval.measure.result import read_result
    from draftsmith.eval.report.report import write_report
    from draftsmith.stages.evaluation import gate

    output, thresholds = own.output, parse_thresholds(own.fail_under)
    if words and not words[0].startswith("-"):
        paths = [Path(word) for word in words]
    else:
        folder = _session("report", words, own.redo).recipe.run_dir / "evaluation"
        paths, output = sorted(folder.glob("*/result.json")), output or folder
    if not paths:
        raise UserError("There is no result.json to report on: run `draftsmith evaluate` first, or name the files.")
    folder = output or paths[0].parent
    write_report([read_result(path) for path in paths], folder)
    print(folder / "report.html")
    return gate(paths, thresholds)


def _inspect(own: Namespace, words: list[str]) -> int:
    from rich.console import Console

    from draftsmith.data.conversations.show import show_conversation
    from draftsmith.stages.answers import samples_at_hand

    session = _session("inspect", words, own.redo)
    console = Console()
    for sample in samples_at_hand(session, own.count):
        show_conversation(sample, session.tokenizer, console)
    return 0


def _plan(own: Namespace, words: list[str]) -> int:
    from draftsmith.plan.devices import find_device
    from draftsmith.plan.plan import assume, comment, count_conversations, describe, make_plan, target_shape

    device = find_device(own.device)
    recipe = _recipe("plan", words, "recipes/eagle3/qwen3-8b.yaml")
    target = target_shape(recipe)
    given = assume(recipe, target, device)
    asked = {"gpus": own.gpus, "utilisation": own.utilisation, "prompt": own.prompt_tokens, "answer": own.answer_tokens}
    given = replace(given, **{key: value for key, value in asked.items() if value is not None})
    count = count_conversations(recipe)
    if recipe.data.heldout >= count:
        raise UserError(
            f"data.heldout is {recipe.data.heldout} but there are only {count} conversations: lower it or add data."
        )
    plan = make_plan(recipe, target, count, given)
    if own.comment:
        print(comment(plan))
        return 0
    print("\n".join([f"plan of {recipe.name}", *describe(plan)]))
    if recipe.train.warm_start:
        print("head: sizes that the recipe leaves null count as the target's; those of train.warm_start are not read")
    return 0


def _doctor(own: Namespace, words: list[str]) -> int:
    from rich.console import Console

    from draftsmith.cli.doctor import run_doctor

    if words:
        raise UserError(f"doctor takes --head and --target, or no options to check this machine, but not {words[0]}.")
    if own.head is None and own.target is None:
        return run_doctor(Console())
    if own.head is None or own.target is None:
        lost = "--target" if own.head else "--head"
        raise UserError(
            f"doctor compares a head with a target, but {lost} is missing: give --head FOLDER --target PATH."
        )
    from draftsmith.cli.compatibility import run_fit

    return run_fit(own.head, own.target, Console())


def _count(name: str) -> dict[str, Any]:
    return {"metavar": "N", "type": whole_number(name, "a number of at least 1")}


_REDO = option(
    "--redo",
    action="append",
    default=[],
    metavar="STAGE",
    help="Remove a stage (answers, features, train, evaluate, simulate, export) and make it again.",
)
_LAUNCH = option(
    "--launch", metavar="FILE", help="Train in processes of their own, with this configuration of accelerate."
)
_FAIL_UNDER = option(
    "--fail-under",
    action="append",
    default=[],
    metavar="T",
    help="Exit with code 3 where a number is below its threshold, written "
    "[DRAFTER:][SLICE.]METRIC[.low][@T<temperature>]=NUMBER: tau=2.5,code.tau.low@T0=3.",
)
_HEAD = option("--head", type=Path, metavar="FOLDER", help="This head instead of the run's best.")

COMMANDS: dict[str, Command] = {
    "run": Command(
        "all stages of a recipe: answers, features, training, evaluation, export, report",
        _run,
        (_REDO, _LAUNCH, _FAIL_UNDER),
    ),
    "regenerate": Command("let the target answer the prompts of the data", _regenerate, (_REDO,)),
    "extract": Command("store the target's hidden states", _extract, (_REDO,)),
    "train": Command("train the head (also: accelerate launch train/eagle.py)", _train, (_REDO, _LAUNCH)),
    "evaluate": Command(
        "decode and simulate: tau, speedup and losslessness (--no-decode: simulate only)",
        _evaluate,
        (option("--no-decode", action="store_true", help="Simulate only."), _HEAD, _REDO, _FAIL_UNDER),
    ),
    "search-tree": Command(
        "find the tree of drafts that suits a trained head and this machine",
        _search_tree,
        (
            option(
                "--nodes",
                type=read_nodes,
                metavar="N",
                help="Drafted tokens per round; auto (if left out) takes as many as are fastest here.",
            ),
            option(
                "--temperature",
                type=read_temperature,
                metavar="T",
                help="For sampling at this temperature instead of that of the run's answers.",
            ),
            option("--output", type=Path, metavar="FILE", help="The file; tree.json in the run directory if left out."),
            _HEAD,
        ),
    ),
    "export": Command(
        "write the directory that a serving engine loads",
        _export,
        (
            _HEAD,
            _REDO,
            option(
                "--gguf",
                type=Path,
                metavar="TREE",
                help="Also convert for llama.cpp with this source tree of it.",
            ),
            option("--gguf-type", metavar="TYPE", help=f"What it stores weights as: {', '.join(CONVERTER_TYPES)}."),
            option(
                "--gguf-pre",
                metavar="NAME",
                help="The pre-tokenizer, where the converter does not know the tokenizer.",
            ),
        ),
    ),
    "report": Command(
        "render report.html and report.md from result.json files (those named, or those of a recipe's run)",
        _report,
        (
            option("--output", type=Path, metavar="FOLDER", help="The folder that the report goes to."),
            _REDO,
            _FAIL_UNDER,
        ),
    ),
    "inspect": Command(
        "show conversations with the supervised tokens in colour",
        _inspect,
        (
            option(
                "--count",
                type=whole_number("--count", "a number of conversations, at least 1"),
                default=3,
                metavar="N",
                help="How many conversations.",
            ),
            _REDO,
        ),
    ),
    "plan": Command(
        "data size, time and memory that a recipe needs, from the target's config alone",
        _plan,
        (
            option("--device", default="h100", metavar="NAME", help="The GPU; h100 if left out."),
            option("--gpus", **_count("--gpus"), help="How many of them."),
            option(
                "--utilisation",
                type=number("--utilisation", "a share above 0 and at most 1", lambda value: 0 < value <= 1),
                metavar="SHARE",
                help="How much of its peak a GPU reaches.",
            ),
            option("--prompt-tokens", **_count("--prompt-tokens"), help="Tokens of a prompt."),
            option("--answer-tokens", **_count("--answer-tokens"), help="Tokens of an answer."),
            option("--comment", action="store_true", help="Print the lines that open a recipe."),
        ),
    ),
    "doctor": Command(
        "check this machine, or with --head and --target whether a head belongs to a target",
        _doctor,
        (
            option("--head", type=Path, metavar="FOLDER", help="A checkpoint, a run, an export or a published head."),
            option("--target", metavar="PATH", help="Folder or Hub name of the target."),
        ),
        takes_recipe=False,
    ),
}
