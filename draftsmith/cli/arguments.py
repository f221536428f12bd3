"""Words of the command line that are no keys of a recipe."""

import math
from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.stages.options import GgufOptions, TreeOptions

MOST_NODES = 1023
"""Drafted tokens of the largest tree that can be asked for."""

CONVERTER_TYPES = ("f32", "f16", "bf16", "q8_0")
"""What llama.cpp's converter can store weights as."""


def take(words: list[str], name: str, *, flag: bool = False) -> list[str]:
    """Remove every `name VALUE` (or the flag `name`) from `words` and return the values."""
    values, place = [], 0
    while place < len(words):
        word = words[place]
        if word == name and flag:
            values.append(words.pop(place))
        elif word == name:
            if place + 1 >= len(words):
                raise UserError(f"{name} needs a value.")
            values.append(words[place + 1])
            del words[place : place + 2]
        elif word.startswith(name + "=") and not flag:
            values.append(words.pop(place).split("=", 1)[1])
        else:
            place += 1
    return values


def require_recipe(words: list[str], command: str, example: str = "recipes/eagle3/tiny.yaml") -> None:
    """Raise UserError where a command has neither a recipe nor a target, nor asks for help."""
    named = ("--recipe", "--target.path", "--help", "-h")
    if not any(word.split("=", 1)[0] in named for word in words):
        example = next((word for word in words if word.endswith((".yaml", ".yml"))), example)
        raise UserError(f"{command} needs a recipe: add --recipe {example}, or a recipe of your own.")


def tree_options(words: list[str]) -> TreeOptions:
    """Take the options out of `words`. Raises UserError for values that mean nothing."""
    if take(words, "--redo"):
        raise UserError("search-tree makes no stage of a recipe: leave --redo out, a tree is searched every time.")
    nodes, temperature = take(words, "--nodes") or ["auto"], take(words, "--temperature")
    output, head = take(words, "--output"), take(words, "--head")
    return TreeOptions(
        None if nodes[-1] == "auto" else _nodes(nodes[-1]),
        _temperature(temperature[-1]) if temperature else None,
        Path(output[-1]) if output else None,
        Path(head[-1]) if head else None,
    )


@dataclass(frozen=True)
class FitOptions:
    """What `draftsmith doctor` is asked about: whether `head`, a folder, belongs to `target`, a folder or a Hub name."""

    head: Path
    target: str

    @classmethod
    def take(cls, words: list[str]) -> "FitOptions | None":
        """Take both options out of `words`; None without any. Raises UserError for one alone and for anything else."""
        head, target = take(words, "--head"), take(words, "--target")
        if words:
            raise UserError(
                f"doctor takes --head and --target, or no options to check this machine, but not {words[0]}."
            )
        if bool(head) != bool(target):
            lost = "--target" if head else "--head"
            raise UserError(
                f"doctor compares a head with a target, but {lost} is missing: give --head FOLDER --target PATH."
            )
        return cls(Path(head[-1]), target[-1]) if head else None


def gguf_options(words: list[str]) -> GgufOptions | None:
    """Take the options out of `words`; None without --gguf. Raises UserError for values that mean nothing."""
    tree, outtype, pre = (take(words, name) for name in ("--gguf", "--gguf-type", "--gguf-pre"))
    if not tree and (outtype or pre):
        raise UserError(
            f"{'--gguf-type' if outtype else '--gguf-pre'} is for conversion: name a llama.cpp source tree with --gguf."
        )
    if outtype and outtype[-1] not in CONVERTER_TYPES:
        raise UserError(
            f"--gguf-type is {outtype[-1]!r}: choose one of {', '.join(CONVERTER_TYPES)}; for others convert to one of these, "
            "then run llama-quantize."
        )
    if not tree:
        return None
    return GgufOptions(Path(tree[-1]), outtype[-1] if outtype else None, pre[-1] if pre else None)


def _nodes(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_NODES:
        raise UserError(
            f"--nodes is {text!r}: give the number of drafted tokens, from 1 to {MOST_NODES}, or auto for the fastest."
        )
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UserError(f"--temperature is {text!r}: give 0 (greedy) or a larger number.")
    return value
