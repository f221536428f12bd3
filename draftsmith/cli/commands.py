"""The commands: what each is for, the options it takes besides a recipe, and the function that carries it out.

Nothing slow is imported here: a command's function is looked up when it is called.
"""

from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name

from draftsmith.cli.engine_options import ACCEPTANCE, VERIFY, WATCH
from draftsmith.errors import UserError
from draftsmith.recipe.options import Option, number, text, whole_number

MOST_NODES = 1023
"""Drafted tokens of the largest tree that can be asked for."""
CONVERTER_TYPES = ("f32", "f16", "bf16", "q8_0")
"""What llama.cpp's converter can store weights as."""


@dataclass(frozen=True)
class Command:
    """help: what it does, for the list of commands. options: what it takes besides a recipe; takes_recipe: whether it takes one.
    words: what stands before the options, for the help. function: of draftsmith.cli, "module:name", which gets the values of the
    options and the words of the recipe; the one of its name in actions if left out."""

    help: str
    options: tuple[Option, ...] = ()
    function: str = ""
    takes_recipe: bool = True
    words: str = ""

    def run(self, own: Namespace, words: list[str]) -> int:
        """Carry the command out, and return its exit code."""
        return int(resolve_name(f"draftsmith.cli.{self.function}")(own, words))


def read_nodes(text: str) -> int | None:
    """Read the size of a tree, None for auto."""
    what = f"the number of drafted tokens, from 1 to {MOST_NODES}, or auto for the fastest"
    return None if text == "auto" else whole_number(what, MOST_NODES)(text)


def read_converter_type(text: str) -> str:
    """Read what llama.cpp's converter is to store weights as."""
    if text not in CONVERTER_TYPES:
        raise UserError(
            f"is {text!r}: choose one of {', '.join(CONVERTER_TYPES)}; for others convert to one of these, then run llama-quantize."
        )
    return text


def diagnose(own: Namespace, words: list[str]) -> int:
    """Carry out `draftsmith doctor`: check this machine, or with --head and --target whether they belong together."""
    if words:
        raise UserError(f"doctor takes --head and --target, or no options to check this machine, but not {words[0]}.")
    if own.head is None and own.target is None:
        from draftsmith.cli.doctor import run_doctor

        return run_doctor()
    if own.head is None or own.target is None:
        lost = "--target" if own.head else "--head"
        raise UserError(
            f"doctor compares a head with a target, but {lost} is missing: give --head FOLDER --target PATH."
        )
    from draftsmith.cli.compatibility import run_fit

    return run_fit(own.head, own.target)


_read_temperature = number("0 (greedy), or a number up to 100", lambda value: 0 <= value <= 100)
_read_count = whole_number("a number of at least 1")
_read_share = number("a number above 0 and below 1", lambda value: 0 < value < 1)

REDO = Option(
    "--redo STAGE ...", "Remove a stage (answers, features, train, evaluate, simulate, export) and make it again."
)
_QUIET = Option("--quiet", "Print results, warnings and the verdict, but no progress.")
_LAUNCH = Option(
    "--launch FILE",
    "Make answers and hidden states and train in processes of their own, or measure in those that share the target, with this configuration of accelerate, a file or a name that `draftsmith recipes` lists.",
)
_GATE = (
    Option(
        "--fail-under T ...",
        "Exit with code 3 where a number is below its threshold, written "
        "[DRAFTER:][SLICE.]METRIC[.low][@T<temperature>]=NUMBER: tau=2.5,code.tau.low@T0=3.",
    ),
    Option("--junit FILE", "Write the checks of --fail-under there as well, as JUnit XML for CI.", Path),
)
_HEAD = Option("--head FOLDER", "This head instead of the run's best.", Path)
_TREE = (
    Option("--nodes N", "Drafted tokens per round; auto (if left out) takes as many as are fastest here.", read_nodes),
    Option(
        "--temperature T", "For sampling at this temperature instead of that of the run's answers.", _read_temperature
    ),
    Option("--chain", "Find where a chain should end instead, by the head's own confidence."),
    Option("--output FILE", "The file; tree.json (chain.json) in the run directory if left out.", Path),
    _HEAD,
)
_CHAT = (
    Option("--prompt TEXT", "Answer this alone, and end.", text),
    Option("--system TEXT", "The system text that the conversation begins with.", text),
    Option(
        "--temperature T",
        "Sample at this temperature instead of the first of evaluate.temperatures.",
        _read_temperature,
    ),
    Option("--compare", "Measure the speedup on whole answers, which the target then writes alone, too."),
    _HEAD,
)
_GGUF = (
    Option("--gguf TREE", "Also convert for llama.cpp with this source tree of it.", Path),
    Option("--gguf-type TYPE", f"What it stores weights as: {', '.join(CONVERTER_TYPES)}.", read_converter_type),
    Option("--gguf-pre NAME", "The pre-tokenizer, where the converter does not know the tokenizer."),
)
_REPORT = (
    Option("--output FOLDER", "The folder that the report goes to.", Path),
    Option(
        "--costs FILE",
        "Decide for the machine of this table, which `draftsmith costs` wrote there; the run's own if left out.",
        Path,
    ),
    Option(
        "--price-per-hour PRICE",
        "Price of that machine, for the cost of a million tokens.",
        number("a price above 0 and at most 1000000", lambda value: 0 < value <= 10**6),
    ),
)
_MODEL = Option(
    "--model NAME ...", "What the servers call the target, where that is not its own name; once for each name.", text
)
_COSTS = (
    Option("--output FILE", "The table, a .json file; costs.json if left out.", Path, Path("costs.json")),
    Option(
        "--server URL ...",
        "Measure from a running vLLM or llama-server instead, http://HOST:PORT: once for one that serves the target alone, and once "
        "for each that drafts with the recipe's head, each another number of tokens a round, which is read from its answers.",
        text,
    ),
    _MODEL,
)
_QUALITY = (
    Option("--tasks NAMES", "Names of tasks, or YAML files; commas between them.", text),
    Option(
        "--limit N",
        "The first N prompts of each task; all if left out.",
        whole_number("a number of prompts, at least 1"),
    ),
    Option("--output FILE", "The scores, a .json file; quality.json if left out.", Path, Path("quality.json")),
    _HEAD,
)
_CERTIFY = (
    Option(
        "--output FILE",
        "A .json file; certificate.json if left out. Its page lies beside.",
        Path,
        Path("certificate.json"),
    ),
    Option(
        "--url URL ...",
        "Two servers in place of this decoder, vLLM or llama-server, http://HOST:PORT: one that drafts, then one that does not.",
        text,
    ),
    _MODEL,
    Option("--distance D", "The total variation to be found; 0.05 if left out.", _read_share, 0.05),
    Option("--power P", "The probability to find it; 0.9 if left out.", _read_share, 0.9),
    Option("--level A", "How often, at most, a right decoder fails; 0.01 if left out.", _read_share, 0.01),
    Option("--prompts N", "How many prompts; 5 if left out.", whole_number("a number of prompts", 1000), 5),
    Option("--tokens N", "First tokens of an answer; 8 at most if left out.", whole_number("a number", 64)),
    _HEAD,
)
_COMPARE = (
    Option(
        "--drafter NAME ...", "Compare this drafter, or OLD=NEW of different names; all of the same name if left out."
    ),
    Option("--output FILE", "Keep the whole comparison, in a file that ends in .md or .json.", Path),
    Option("--fail-if-worse", "Exit with code 3 where a number is worse beyond noise."),
)
_seconds = number("a number of seconds above 0 and at most 86400", lambda value: 0 < value <= 86400)
_SERVED = (
    Option(
        "--url URL ...",
        "Measure a running server that speaks OpenAI's chats, http://HOST:PORT: first the target alone, then each that drafts; they answer the "
        "recipe's prompts in turns (without a recipe give --evaluate.prompts), evaluate.plan_batches of them at once.",
        text,
    ),
    Option("--model NAME ...", "What the servers call the target, where that is not its own name.", text),
    Option(
        "--report FILE",
        "The result.json of an evaluation: from its tau the speedup is predicted, and its page shows both.",
        Path,
    ),
    Option(
        "--costs FILE",
        "What the speedup is predicted from: a table of `draftsmith costs --server`, or the result.json of --injected.",
        Path,
    ),
    Option(
        "--injected", "The servers accept by rates of `draftsmith what-if`: every answer goes on to its last token."
    ),
    Option("--seconds N", "Of servers: end after so many seconds (600 if left out).", _seconds),
    Option("--request-seconds N", "Of servers: give a request up after so many (60 if left out).", _seconds),
    Option("--output FOLDER", "Of servers: the folder of result.json and report; served if left out.", Path),
)
_WHAT_IF = (
    Option(
        "--tau TAU ...",
        "The accepted length of a head that is not there yet, once for each.",
        number("a tau of at least 1", lambda value: 1 <= value <= 2**13),
    ),
    Option("--draft-length K", "Tokens that a round drafts.", whole_number("a number of tokens, at least 1", 64), 5),
    Option("--report FILE", "A result.json: take the acceptance of its positions, bent to the wanted tau.", Path),
    Option("--drafter NAME", "That drafter of it; its first if left out.", text),
    Option(
        "--costs FILE",
        "Also predict the speedup: a table of `draftsmith costs`, or a result of `evaluate --url`.",
        Path,
    ),
)
_COUNT = Option("--count N", "How many conversations.", whole_number("a number of conversations, at least 1"), 3)
_PLAN = (
    Option(
        "--device NAME",
        "cpu, whose speed is measured here in about 20 seconds, or a GPU of the table (h100, a100, ...); this machine's if left "
        "out.",
    ),
    Option("--gpus N", "How many of them.", _read_count),
    Option("--prompt-tokens N", "Tokens of a prompt.", _read_count),
    Option("--answer-tokens N", "Tokens of an answer.", _read_count),
    Option(
        "--utilisation SHARE",
        "How much of its peak a GPU reaches.",
        number("a share above 0 and at most 1", lambda value: 0 < value <= 1),
    ),
    Option(
        "--pilot FOLDER",
        "A run, such as one with 5% of the data, whose held-out tau is forecast to this recipe's data; the recipe's own if "
        "left out.",
        Path,
    ),
    Option("--comment", "Print the lines that open a recipe."),
)
_FIT = (
    Option("--head FOLDER", "A checkpoint, a run, an export or a published head.", Path),
    Option("--target PATH", "Folder, Hub name or GGUF file of the target, or embedded."),
)

COMMANDS: dict[str, Command] = {
    "run": Command(
        "all stages of a recipe: answers, features, training, evaluation, export, report", (REDO, _LAUNCH, *_GATE)
    ),
    "regenerate": Command(
        "let the target answer the prompts of the data (--launch: in several processes)", (REDO, _LAUNCH)
    ),
    "extract": Command("store the target's hidden states (--launch: in several processes)", (REDO, _LAUNCH)),
    "train": Command("train the head (--launch: in several processes)", (REDO, _LAUNCH)),
    "evaluate": Command(
        "decode and simulate: tau, speedup and losslessness (--no-decode: simulate only; --url: running servers)",
        (Option("--no-decode", "Simulate only."), _HEAD, REDO, _LAUNCH, *_GATE, *_SERVED),
    ),
    "chat": Command(
        "talk with the target while a head drafts: accepted tokens in colour, tau and speedup of every answer", _CHAT
    ),
    "search-tree": Command(
        "find the tree of drafts (--chain: their length) that suits a trained head and this machine",
        _TREE,
        "actions:search",
    ),
    "costs": Command(
        "time target passes and drafts on this machine, or rounds of running servers, for `report --costs` anywhere",
        (*_COSTS, _HEAD),
    ),
    "quality": Command(
        "answer tasks of lm-eval with drafters that change texts (typical acceptance, tuned targets) and with the target alone",
        _QUALITY,
    ),
    "certify": Command(
        "test whether drafted texts are the target's own, here or on running servers, and whether the tests find known faults",
        _CERTIFY,
        "certify:certify",
    ),
    "export": Command("write the directory that a serving engine loads", (_HEAD, REDO, *_GGUF)),
    "report": Command(
        "render report.html and report.md from result.json files (those named, or those of a recipe's run)",
        (*_REPORT, REDO, *_GATE),
    ),
    "compare": Command(
        "say what changed from one run, evaluation folder or result.json to another, with intervals: compare OLD NEW",
        _COMPARE,
        takes_recipe=False,
        words="OLD NEW ",
    ),
    "acceptance": Command(
        "what an engine's log, answers or /metrics tell of acceptance, in everybody's words: acceptance FILE_OR_URL",
        ACCEPTANCE,
        "ledger:acceptance",
        takes_recipe=False,
        words="FILE_OR_URL ",
    ),
    "what-if": Command(
        "what a better head would bring on your server: how engines are started that accept as it would, to be timed with evaluate --url",
        _WHAT_IF,
        "served:what_if",
        takes_recipe=False,
    ),
    "watch": Command(
        "follow what a server accepts, and end with code 3 where it fell for good, 4 where it rose",
        WATCH,
        "watch:watch",
        takes_recipe=False,
    ),
    "verify": Command(
        "replay an export's parity bundle in a running engine, or one that is started, and name what differs and why: verify EXPORT --url BASE",
        VERIFY,
        "verify:verify",
        takes_recipe=False,
        words="EXPORT ",
    ),
    "import": Command(
        "take the MTP layer out of the target's own files as a head, and measure which of the target's states it reads",
        (
            Option(
                "--output FOLDER",
                "The folder of the head; that of the run with -import behind its name if left out.",
                Path,
            ),
        ),
        "actions:import_native",
    ),
    "inspect": Command("show conversations with the supervised tokens in colour", (_COUNT, REDO)),
    "recipes": Command(
        "list the recipes and launch files that come with draftsmith, or print one: recipes eagle3/tiny --output mine.yaml",
        (Option("--output FILE", "Write the one that is named there, into a new file.", Path),),
        takes_recipe=False,
        words="[NAME] ",
    ),
    "plan": Command(
        "hours, disk and memory that every stage of a recipe needs, here or on GPUs, and what would make it shorter",
        _PLAN,
    ),
    "doctor": Command(
        "check this machine, or with --head and --target whether a head belongs to a target",
        _FIT,
        "commands:diagnose",
        takes_recipe=False,
    ),
}
COMMANDS = {
    name: replace(
        command,
        function=command.function or f"actions:{name}",
        options=(*command.options, *((_QUIET,) if command.takes_recipe else ())),
    )
    for name, command in COMMANDS.items()
}

SHARED = ("regenerate", "extract", "train")
"""The commands that several processes may carry out together."""
SPLIT = ("run", "evaluate")
"""Those that processes carry out together which share the target."""
