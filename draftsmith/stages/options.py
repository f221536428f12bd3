"""What a stage is asked for beside the recipe."""

from dataclasses import dataclass
from pathlib import Path


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


@dataclass(frozen=True)
class GgufOptions:
    """How an export is converted for llama.cpp.

    tree: folder of a llama.cpp source tree. outtype: what the converter stores weights as, None for the dtype of the export.
    pre_tokenizer: llama.cpp's name of it, None where the converter knows the tokenizer.
    """

    tree: Path
    outtype: str | None = None
    pre_tokenizer: str | None = None
