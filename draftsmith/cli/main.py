"""The command line: one subcommand per stage, and `run` for all of them.

draftsmith run --recipe recipes/eagle3/tiny.yaml
draftsmith evaluate --recipe R --no-decode
draftsmith inspect --recipe R
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.cli.arguments import gguf_options, require_recipe, take, tree_options
from draftsmith.errors import StoppedError, UserError, did_you_mean

if TYPE_CHECKING:
    from draftsmith.eval.measure.gate import Threshold
    from draftsmith.stages.session import Session

_HELP = ("-h", "--help")
LAUNCHED = "DRAFTSMITH_LAUNCHED"
"""Set for the processes that --launch starts, which inherit that Ctrl-C is ignored."""

COMMANDS: dict[str, str] = {
    "run": "all stages of a recipe: answers, features, training, evaluation, export, report",
    "regenerate": "let the target answer the prompts of the data",
    "extract": "store the target's hidden states",
    "train": "train the head (also: accelerate launch train/eagle.py)",
    "evaluate": "decode and simulate: tau, speedup and losslessness (--no-decode: simulate only)",
    "search-tree": "find the tree of drafts that suits a trained head and this machine",
    "export": "write the directory that a serving engine loads",
    "report": "render report.html and report.md from result.json files",
    "inspect": "show conversations with the supervised tokens in colour",
    "plan": "data size, time and memory that a recipe needs, from the target's config alone",
    "doctor": "check this machine, or with --head and --target whether a head belongs to a target",
}

OPTIONS: dict[str, str] = {
    "--recipe FILE": "the recipe; --section.key VALUE overrides any of its keys",
    "--redo STAGE": "remove a stage (answers, features, train, evaluate, simulate, export) and make it again",
    "--launch FILE": "run, train: train in processes of their own, with this configuration of accelerate",
    "--no-decode": "evaluate: simulate only",
    "--head FOLDER": "evaluate, search-tree, export, doctor: this head instead of the run's best",
    "--fail-under T": "run, evaluate, report: exit with code 3 where a number is below its threshold, written\n"
    "                   [DRAFTER:][SLICE.]METRIC[.low][@T<temperature>]=NUMBER: tau=2.5,code.tau.low@T0=3",
    "--target PATH": "doctor: with --head, folder or Hub name of the target",
    "--count N": "inspect: how many conversations",
    "--output PATH": "report: the folder that the report goes to; search-tree: the file (tree.json in the run directory)",
    "--nodes N": "search-tree: drafted tokens per round; auto (if left out) takes as many as are fastest here",
    "--temperature T": "search-tree: for sampling at this temperature instead of that of the run's answers",
    "--gguf TREE": "export: also convert for llama.cpp with this source tree of it; --gguf-type f32|f16|bf16|q8_0,\n"
    "                   --gguf-pre NAME of the pre-tokenizer where its converter does not know the tokenizer",
    "--device NAME": "plan: the GPU (h100 if left out); also --gpus N, --utilisation SHARE, --prompt-tokens N,\n"
    "                   --answer-tokens N, and --comment for the lines that open a recipe",
}

USAGE = "\n".join(
    [
        "usage: draftsmith COMMAND --recipe FILE [OPTIONS]",
        "\ncommands:",
        *(f"  {name:<16} {text}" for name, text in COMMANDS.items()),
        "\noptions:",
        *(f"  {name:<16} {text}" for name, text in OPTIONS.items()),
    ]
)


def main(argv: list[str] | None = None) -> int:
    """Run a command; return its exit code. A user's mistake is printed as one sentence, with exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if LAUNCHED in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if not words or words[0] in _HELP or (words[0] in ("report", "doctor") and words[-1] in _HELP):
            print(USAGE)
            print("\n`draftsmith train --method METHOD --help` lists every key of a recipe with its meaning.")
            return 0 if words else 2
        if words[0] == "--version":
            import draftsmith

            print(draftsmith.__version__)
            return 0
        return _handler(words[0])(words[1:])
    except StoppedError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("draftsmith: interrupted; run the same command again to go on from here.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


def _handler(command: str) -> Callable[[list[str]], int]:
    """Return what carries out a command. Raises UserError for one that does not exist."""
    if command in COMMANDS:
        return _HANDLERS[command]
    hint = "options come after it; " if command.startswith("-") else ""
    meant = did_you_mean(command.lower(), COMMANDS)
    raise UserError(f"There is no command '{command}'{meant}: {hint}the commands are {', '.join(COMMANDS)}.")


def _session(words: list[str], command: str) -> "Session":
    from draftsmith.stages.run import check_redo, check_stage_names

    redo = take(words, "--redo")
    check_stage_names(redo)
    require_recipe(words, command)
    from draftsmith.recipe.parse import parse_recipe

    # A mistake in the recipe is told before the slow imports.
    recipe = parse_recipe(words, f"draftsmith {command}", COMMANDS[command.split()[0]])
    check_redo(redo, command, recipe)
    from draftsmith.stages.session import Session

    return Session(recipe, redo=set(redo))


def _run(words: list[str]) -> int:
    config, thresholds = take(words, "--launch"), _thresholds(words)
    session = _session(words, "run")
    from draftsmith.cli import launching
    from draftsmith.stages.evaluation import gate
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import check_thresholds, preflight

    if config:
        launching.check_config(session.recipe.train, config[-1])
    lineup = preflight(session, "run")
    check_thresholds(session, thresholds, lineup, decode=True)
    if config:
        launching.train(session, config[-1], words)
    made = make_stages(session, "run", show=_show)
    folder = session.recipe.run_dir / "evaluation"
    print(f"\nreport  {folder / 'report.html'}")
    for temperature in session.recipe.evaluate.temperatures:
        print(f"result  {folder / f't{temperature:g}' / 'result.json'}")
    print(f"export  {made.export or 'none: no layout holds such heads'}")
    return gate(made.results, thresholds)


def _regenerate(words: list[str]) -> int:
    from draftsmith.stages.pipeline import make_stages

    path = make_stages(_session(words, "regenerate"), "regenerate").answers
    if path is None:
        raise UserError("answers.regenerate is false in this recipe: set it to true to let the target answer.")
    print(path)
    return 0


def _extract(words: list[str]) -> int:
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import preflight

    session = _session(words, "extract")
    if session.recipe.features.source == "online":
        raise UserError("features.source is online in this recipe, so nothing is stored: set it to store.")
    preflight(session, "extract")
    make_stages(session, "extract")
    print(session.recipe.data_path / "features")
    return 0


def _train(words: list[str]) -> int:
    config = take(words, "--launch")
    session = _session(words, "train")
    from draftsmith.cli import launching
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import preflight

    if config:
        launching.check_config(session.recipe.train, config[-1])
    preflight(session, "train")
    if config:
        launching.train(session, config[-1], words)
    print(make_stages(session, "train").head)
    return 0


def _evaluate(words: list[str]) -> int:
    decode = not take(words, "--no-decode", flag=True)
    named, thresholds = take(words, "--head"), _thresholds(words)
    command, head = "evaluate" if decode else "evaluate --no-decode", Path(named[-1]) if named else None
    session = _session(words, command)
    from draftsmith.stages.evaluation import gate
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import check_thresholds, preflight

    check_thresholds(session, thresholds, preflight(session, "evaluate", head), decode=decode)
    made = make_stages(session, command, head=head, show=_show)
    for path in made.results:
        print(path)
    return gate(made.results, thresholds)


def _show(results: list[Path]) -> None:
    """Print the headline table of result files."""
    from rich.console import Console

    from draftsmith.eval.measure.result import read_result
    from draftsmith.eval.report.report import headline_table

    Console().print(headline_table([read_result(path) for path in results]))


def _search_tree(words: list[str]) -> int:
    options = tree_options(words)
    session = _session(words, "search-tree")
    from draftsmith.stages.tree_search import search_tree

    print(search_tree(session, options))
    return 0


def _export(words: list[str]) -> int:
    from draftsmith.stages.gguf import check_options, export_gguf
    from draftsmith.stages.pipeline import make_stages
    from draftsmith.stages.preflight import preflight

    named, gguf = take(words, "--head"), gguf_options(words)
    session = _session(words, "export")
    head = Path(named[-1]) if named else None
    preflight(session, "export", head)
    if gguf:
        check_options(session, gguf, head)
    exported = make_stages(session, "export", head=head).export
    assert exported is not None
    print(export_gguf(session, exported, gguf) if gguf else exported)
    return 0


def _report(words: list[str]) -> int:
    """`draftsmith report RESULT.json ... [--output FOLDER]`, or with --recipe the results of its run."""
    from draftsmith.eval.measure.result import read_result
    from draftsmith.eval.report.report import write_report
    from draftsmith.stages.evaluation import gate

    output, thresholds = take(words, "--output"), _thresholds(words)
    if words and not words[0].startswith("--"):
        paths = [Path(word) for word in words]
    else:
        folder = _session(words, "report").recipe.run_dir / "evaluation"
        paths = sorted(folder.glob("*/result.json"))
        output = output or [str(folder)]
    if not paths:
        raise UserError("There is no result.json to report on: run `draftsmith evaluate` first, or name the files.")
    folder = Path(output[-1]) if output else paths[0].parent
    write_report([read_result(path) for path in paths], folder)
    print(folder / "report.html")
    return gate(paths, thresholds)


def _thresholds(words: list[str]) -> "list[Threshold]":
    """Take --fail-under out of `words`; what is malformed is refused before any work."""
    from draftsmith.eval.measure.gate import parse_thresholds

    return parse_thresholds(take(words, "--fail-under"))


def _inspect(words: list[str]) -> int:
    """Show samples as the head sees them; `--count N` of them."""
    from rich.console import Console

    from draftsmith.data.conversations.show import show_conversation
    from draftsmith.stages.answers import samples_at_hand

    count = take(words, "--count") or ["3"]
    if not count[-1].isdecimal() or not int(count[-1]):
        raise UserError(f"--count is {count[-1]!r}: give a number of conversations, at least 1.")
    session = _session(words, "inspect")
    console = Console()
    for sample in samples_at_hand(session, int(count[-1])):
        show_conversation(sample, session.tokenizer, console)
    return 0


def _plan(words: list[str]) -> int:
    from draftsmith.cli.plan import plan_command

    print(plan_command(words))
    return 0


def _doctor(words: list[str]) -> int:
    from draftsmith.cli.doctor import doctor_command

    return doctor_command(words)


_HANDLERS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "regenerate": _regenerate,
    "extract": _extract,
    "train": _train,
    "evaluate": _evaluate,
    "search-tree": _search_tree,
    "export": _export,
    "report": _report,
    "inspect": _inspect,
    "plan": _plan,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
