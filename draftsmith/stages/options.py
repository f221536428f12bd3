"""What a stage is asked for beside the recipe."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.recipe.options import number, whole_number

MOST_NODES = 1023
"""Drafted tokens of the largest tree that can be asked for."""

CONVERTER_TYPES = ("f32", "f16", "bf16", "q8_0")
"""What llama.cpp's converter can store weights as."""

_whole = whole_number(
    "--nodes", f"the number of drafted tokens, from 1 to {MOST_NODES}, or auto for the fastest", MOST_NODES
)
read_temperature = number("--temperature", "0 (greedy) or a larger number", lambda value: 0 <= value < float("inf"))


def read_nodes(text: str) -> int | None:
    """Read the size of a tree, None for auto."""
    return None if text == "auto" else _whole(text)


@dataclass(frozen=True)
class TreeOptions:
    """What the tree search is asked for.

    nodes: of the tree, None for as many as are fastest. temperature: None for that of the run's answers. output: the file,
    None for tree.json in the run directory. head: its folder, None for the run's own.
    """

    nodes: int | None = None
    temperature: float | None = None
    output: Path | None = None
    head: Path | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None:
            read_nodes(str(self.nodes))
        if self.temperature is not None:
            read_temperature(str(self.temperature))


@dataclass(frozen=True)
class GgufOptions:
    """How an export is converted for llama.cpp.

    tree: folder of a llama.cpp source tree. outtype: what the converter stores weights as, None for the dtype of the export.
    pre_tokenizer: llama.cpp's name of it, None where the converter knows the tokenizer.
    """

    tree: Path
    outtype: str | None = None
    pre_tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.outtype is not None and self.outtype not in CONVERTER_TYPES:
            raise UserError(
                f"--gguf-type is {self.outtype!r}: choose one of {', '.join(CONVERTER_TYPES)}; for others convert to one of "
                "these, then run llama-quantize."
            )

    @classmethod
    def asked(cls, tree: Path | None, outtype: str | None, pre_tokenizer: str | None) -> "GgufOptions | None":
        """Return what --gguf, --gguf-type and --gguf-pre ask for; None without --gguf, and UserError for the others alone."""
        if tree is not None:
            return cls(tree, outtype, pre_tokenizer)
        if outtype or pre_tokenizer:
            alone = "--gguf-type" if outtype else "--gguf-pre"
            raise UserError(f"{alone} is for conversion: name a llama.cpp source tree with --gguf.")
        return None
