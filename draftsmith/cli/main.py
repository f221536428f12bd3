"""The command line: one subcommand per stage, and `run` for all of them. The first word chooses it; the rest is its own.

draftsmith run --recipe recipes/eagle3/tiny.yaml
draftsmith evaluate --recipe R --no-decode
draftsmith inspect --recipe R
"""

import argparse
import os
import signal
import sys

from draftsmith.cli.boundary import at_boundary
from draftsmith.cli.commands import COMMANDS, SHARED, SPLIT
from draftsmith.errors import UserError, did_you_mean
from draftsmith.progress import choose_progress
from draftsmith.recipe.options import take_options
from draftsmith.train.meeting import together
from draftsmith.train.process import ENDING, LAUNCHED, end_with_launcher, on_signals, raise_terminated, world

_TOP = ("-h", "--help", "--version", "--print_completion")


@at_boundary
def main(argv: list[str] | None = None, script: str | None = None) -> int:
    """Run a command; return its exit code. A user's mistake is printed as one sentence, with exit code 2; Ctrl-C ends with 130,
    SIGTERM with 143. script: the file of train/ that was launched, for `train`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if LAUNCHED in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_launcher()
    with on_signals(raise_terminated, ENDING):
        if not words or words[0].split("=")[0] in _TOP:
            return _top(words)
        name = words[0]
        if name not in COMMANDS:
            hint = "options come after it; " if name.startswith("-") else ""
            meant = did_you_mean(name.lower(), COMMANDS)
            raise UserError(f"There is no command '{name}'{meant}: {hint}the commands are {', '.join(COMMANDS)}.")
        if name not in SHARED and world().size > 1 and not (name in SPLIT and _shares(name, words[1:])):
            raise UserError(
                f"WORLD_SIZE is {world().size} in the environment, but `draftsmith {name}` works in one process: leave the launcher out, "
                f"or unset WORLD_SIZE and RANK; only {', '.join(SHARED)} take several, and {' and '.join(SPLIT)} those that share the target "
                "(target.tensor_parallel)."
            )
        with together():
            own, rest = take_options(words[1:], COMMANDS[name].options)
            choose_progress(quiet=getattr(own, "quiet", False))
            own.script = script
            return _help(name, rest) if {"-h", "--help"} & set(rest) else COMMANDS[name].run(own, rest)


def _shares(name: str, words: list[str]) -> bool:
    """Return whether the recipe of a command has several processes share its target."""
    from draftsmith.recipe.parse import parse_recipe

    command = COMMANDS[name]
    rest = take_options(words, command.options)[1]
    if {"-h", "--help"} & set(rest):
        return False
    return parse_recipe(rest, f"draftsmith {name}", command.help, command.options).target.tensor_parallel > 1


def _help(name: str, words: list[str]) -> int:
    """Print the options of a command and every key of a recipe, of the method that the words name."""
    command = COMMANDS[name]
    if command.takes_recipe:
        from draftsmith.recipe.parse import parse_recipe

        parse_recipe(words, f"draftsmith {name}", command.help, command.options)
    parser = argparse.ArgumentParser(
        prog=f"draftsmith {name}", description=command.help, usage=f"draftsmith {name} {command.words}[OPTIONS]"
    )
    for one in command.options:
        one.add_to(parser)
    print(parser.format_help(), end="")  # argparse itself would not say that it cannot print
    return 0


def _top(words: list[str]) -> int:
    """Print the list of commands, the version, or a script for the shell that completes all words."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    import draftsmith

    if words[:1] == ["--version"]:
        print(draftsmith.__version__)
        return 0
    complete = bool(words) and words[0].startswith("--print_completion")
    set_parsing_settings(add_print_completion_argument=True)
    try:
        parser = ArgumentParser(
            prog="draftsmith", description="Train, measure and export draft heads for speculative decoding."
        )
        commands = parser.add_subcommands(required=False, title="commands", metavar="COMMAND")
        for name, command in COMMANDS.items():
            own = ArgumentParser()
            if complete:
                from draftsmith.recipe.parse import recipe_parser

                own = recipe_parser("eagle3", name, command.help, command.options) if command.takes_recipe else own
                for one in () if command.takes_recipe else command.options:
                    one.add_to(own)
            commands.add_subcommand(name, own, help=command.help)
        parser.add_argument("--version", action="version", version=draftsmith.__version__)
        if complete:
            parser.parse_args(words)
        print(parser.format_help(), end="")
    finally:
        set_parsing_settings(add_print_completion_argument=False)
    return 0 if words else 2


if __name__ == "__main__":
    sys.exit(main())
