"""The commands: what each is for, the options it takes besides a recipe, and the function that carries it out.

Nothing slow is imported here: a command's function is looked up when it is called.
"""

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name

from draftsmith.errors import UserError
from draftsmith.recipe.options import Option, number, option, text, whole_number

MOST_NODES = 1023
"""Drafted tokens of the largest tree that can be asked for."""
CONVERTER_TYPES = ("f32", "f16", "bf16", "q8_0")
"""What llama.cpp's converter can store weights as."""


@dataclass(frozen=True)
class Command:
    """help: what it does, for the list of commands. function: of draftsmith.cli, "module:name", which gets the values of the
    options and the words of the recipe. options: what it takes besides a recipe; takes_recipe: whether it takes one. words:
    what stands before the options, for the help."""

    help: str
    function: str
    options: tuple[Option, ...] = ()
    takes_recipe: bool = True
    words: str = ""

    def run(self, own: Namespace, words: list[str]) -> int:
        """Carry the command out, and return its exit code."""
        return int(resolve_name(f"draftsmith.cli.{self.function}")(own, words))


def read_nodes(text: str) -> int | None:
    """Read the size of a tree, None for auto."""
    what = f"the number of drafted tokens, from 1 to {MOST_NODES}, or auto for the fastest"
    return None if text == "auto" else whole_number("--nodes", what, MOST_NODES)(text)


def read_converter_type(text: str) -> str:
    """Read what llama.cpp's converter is to store weights as."""
    if text not in CONVERTER_TYPES:
        raise UserError(
            f"--gguf-type is {text!r}: choose one of {', '.join(CONVERTER_TYPES)}; for others convert to one of these, then run "
            "llama-quantize."
        )
    return text


REDO = option(
    "--redo",
    action="append",
    default=[],
    metavar="STAGE",
    help="Remove a stage (answers, features, train, evaluate, simulate, export) and make it again.",
)
_QUIET = option("--quiet", action="store_true", help="Print results, warnings and the verdict, but no progress.")
_LAUNCH = option(
    "--launch",
    metavar="FILE",
    help="Train in processes of their own, with this configuration of accelerate, a file or a name that `draftsmith recipes` lists.",
)
_FAIL_UNDER = option(
    "--fail-under",
    action="append",
    default=[],
    metavar="T",
    help="Exit with code 3 where a number is below its threshold, written "
    "[DRAFTER:][SLICE.]METRIC[.low][@T<temperature>]=NUMBER: tau=2.5,code.tau.low@T0=3.",
)
_JUNIT = option(
    "--junit", type=Path, metavar="FILE", help="Write the checks of --fail-under there as well, as JUnit XML for CI."
)
_GATE = (_FAIL_UNDER, _JUNIT)
_HEAD = option("--head", type=Path, metavar="FOLDER", help="This head instead of the run's best.")
_NO_DECODE = option("--no-decode", action="store_true", help="Simulate only.")

_read_temperature = number("--temperature", "0 (greedy), or a number up to 100", lambda value: 0 <= value <= 100)
_TREE = (
    option(
        "--nodes",
        type=read_nodes,
        metavar="N",
        help="Drafted tokens per round; auto (if left out) takes as many as are fastest here.",
    ),
    option(
        "--temperature",
        type=_read_temperature,
        metavar="T",
        help="For sampling at this temperature instead of that of the run's answers.",
    ),
    option("--output", type=Path, metavar="FILE", help="The file; tree.json in the run directory if left out."),
    _HEAD,
)
_CHAT = (
    option("--prompt", type=text("--prompt"), metavar="TEXT", help="Answer this alone, and end."),
    option(
        "--system", type=text("--system"), metavar="TEXT", help="The system text that the conversation begins with."
    ),
    option(
        "--temperature",
        type=_read_temperature,
        metavar="T",
        help="Sample at this temperature instead of the first of evaluate.temperatures.",
    ),
    option(
        "--compare",
        action="store_true",
        help="Measure the speedup on whole answers, which the target then writes alone, too.",
    ),
    _HEAD,
)
_GGUF = (
    option("--gguf", type=Path, metavar="TREE", help="Also convert for llama.cpp with this source tree of it."),
    option(
        "--gguf-type",
        type=read_converter_type,
        metavar="TYPE",
        help=f"What it stores weights as: {', '.join(CONVERTER_TYPES)}.",
    ),
    option("--gguf-pre", metavar="NAME", help="The pre-tokenizer, where the converter does not know the tokenizer."),
)
_REPORT = (
    option("--output", type=Path, metavar="FOLDER", help="The folder that the report goes to."),
    option(
        "--costs",
        type=Path,
        metavar="FILE",
        help="Decide for the machine of this table, which `draftsmith costs` wrote there; the run's own if left out.",
    ),
    option(
        "--price-per-hour",
        type=number("--price-per-hour", "a price above 0 and at most 1000000", lambda value: 0 < value <= 10**6),
        metavar="PRICE",
        help="Price of that machine, for the cost of a million tokens.",
    ),
)
_COSTS = (
    option(
        "--output",
        type=Path,
        default=Path("costs.json"),
        metavar="FILE",
        help="The table, a .json file; costs.json if left out.",
    ),
    option(
        "--server",
        action="append",
        default=[],
        type=text("--server"),
        metavar="URL",
        help="Measure from a running vLLM or llama-server instead, http://HOST:PORT: once for one that serves the target alone, and once "
        "for each that drafts with the recipe's head, each another number of tokens a round, which is read from its answers.",
    ),
    option(
        "--model",
        action="append",
        default=[],
        type=text("--model"),
        metavar="NAME",
        help="What the servers call the target, where that is not its own name; once for each name.",
    ),
)
_QUALITY = (
    option(
        "--tasks", type=text("--tasks"), metavar="NAMES", help="Names of tasks, or YAML files; commas between them."
    ),
    option(
        "--limit",
        type=whole_number("--limit", "a number of prompts, at least 1"),
        metavar="N",
        help="The first N prompts of each task; all if left out.",
    ),
    option(
        "--output",
        type=Path,
        default=Path("quality.json"),
        metavar="FILE",
        help="The scores, a .json file; quality.json if left out.",
    ),
    _HEAD,
)
_COMPARE = (
    option(
        "--drafter",
        action="append",
        default=[],
        metavar="NAME",
        help="Compare this drafter, or OLD=NEW of different names; all of the same name if left out.",
    ),
    option(
        "--output", type=Path, metavar="FILE", help="Keep the whole comparison, in a file that ends in .md or .json."
    ),
    option("--fail-if-worse", action="store_true", help="Exit with code 3 where a number is worse beyond noise."),
)
_COUNT = option(
    "--count",
    type=whole_number("--count", "a number of conversations, at least 1"),
    default=3,
    metavar="N",
    help="How many conversations.",
)
_PLAN = (
    option(
        "--device",
        metavar="NAME",
        help="cpu, whose speed is measured here in about 20 seconds, or a GPU of the table (h100, a100, ...); this machine's if left "
        "out.",
    ),
    *(
        option(name, metavar="N", type=whole_number(name, "a number of at least 1"), help=text)
        for name, text in (
            ("--gpus", "How many of them."),
            ("--prompt-tokens", "Tokens of a prompt."),
            ("--answer-tokens", "Tokens of an answer."),
        )
    ),
    option(
        "--utilisation",
        type=number("--utilisation", "a share above 0 and at most 1", lambda value: 0 < value <= 1),
        metavar="SHARE",
        help="How much of its peak a GPU reaches.",
    ),
    option(
        "--pilot",
        type=Path,
        metavar="FOLDER",
        help="A run, such as one with 5% of the data, whose held-out tau is forecast to this recipe's data; the recipe's own if "
        "left out.",
    ),
    option("--comment", action="store_true", help="Print the lines that open a recipe."),
)
_FIT = (
    option("--head", type=Path, metavar="FOLDER", help="A checkpoint, a run, an export or a published head."),
    option("--target", metavar="PATH", help="Folder, Hub name or GGUF file of the target, or embedded."),
)

COMMANDS: dict[str, Command] = {
    "run": Command(
        "all stages of a recipe: answers, features, training, evaluation, export, report",
        "actions:run",
        (REDO, _LAUNCH, *_GATE),
    ),
    "regenerate": Command("let the target answer the prompts of the data", "actions:regenerate", (REDO,)),
    "extract": Command("store the target's hidden states", "actions:extract", (REDO,)),
    "train": Command("train the head (--launch: in several processes)", "actions:train", (REDO, _LAUNCH)),
    "evaluate": Command(
        "decode and simulate: tau, speedup and losslessness (--no-decode: simulate only)",
        "actions:evaluate",
        (_NO_DECODE, _HEAD, REDO, *_GATE),
    ),
    "chat": Command(
        "talk with the target while a head drafts: accepted tokens in colour, tau and speedup of every answer",
        "actions:chat",
        _CHAT,
    ),
    "search-tree": Command(
        "find the tree of drafts that suits a trained head and this machine", "actions:search", _TREE
    ),
    "costs": Command(
        "time target passes and drafts on this machine, or rounds of running servers, for `report --costs` anywhere",
        "actions:costs",
        (*_COSTS, _HEAD),
    ),
    "quality": Command(
        "answer tasks of lm-eval with drafters that change texts (typical acceptance, tuned targets) and with the target alone",
        "actions:quality",
        _QUALITY,
    ),
    "export": Command("write the directory that a serving engine loads", "actions:export", (_HEAD, REDO, *_GGUF)),
    "report": Command(
        "render report.html and report.md from result.json files (those named, or those of a recipe's run)",
        "actions:report",
        (*_REPORT, REDO, *_GATE),
    ),
    "compare": Command(
        "say what changed from one run, evaluation folder or result.json to another, with intervals: compare OLD NEW",
        "actions:compare",
        _COMPARE,
        takes_recipe=False,
        words="OLD NEW ",
    ),
    "inspect": Command("show conversations with the supervised tokens in colour", "actions:inspect", (_COUNT, REDO)),
    "recipes": Command(
        "list the recipes and launch files that come with draftsmith, or print one: recipes eagle3/tiny --output mine.yaml",
        "actions:recipes",
        (option("--output", type=Path, metavar="FILE", help="Write the one that is named there, into a new file."),),
        takes_recipe=False,
        words="[NAME] ",
    ),
    "plan": Command(
        "hours, disk and memory that every stage of a recipe needs, here or on GPUs, and what would make it shorter",
        "actions:plan",
        _PLAN,
    ),
    "doctor": Command(
        "check this machine, or with --head and --target whether a head belongs to a target",
        "doctor:diagnose",
        _FIT,
        takes_recipe=False,
    ),
}
COMMANDS |= {
    name: replace(command, options=(*command.options, _QUIET))
    for name, command in COMMANDS.items()
    if command.takes_recipe
}
