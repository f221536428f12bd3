"""A layout: how heads of a method are written for engines, and how each engine takes the files.

A method's formats.py lists its layouts as LAYOUTS, the default first. A contract (contracts.py) is about files alone; a
`Rule` is about a head that the files could hold and an engine would not compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.formats.contracts import Contract, ExportRequest, ModelFiles
from draftsmith.heads.formats.engines import ENGINES
from draftsmith.heads.formats.start import Serving, Snippet
from draftsmith.heads.registry import find_method, is_known, methods, served_method
from draftsmith.heads.target.target import Target


@dataclass(frozen=True)
class Rule:
    """A head that an engine does not compute as it was trained.

    what: the head, in a recipe's words. why follows the engine's name, instead says what to do. found(files, target, head):
    whether it is such a head. refused: the layout's export is refused; otherwise other engines serve the files, and the
    README leaves this engine out.
    """

    what: str
    why: str
    instead: str
    found: Callable[[ModelFiles, Target, DraftHead], bool]
    refused: bool = True


@dataclass(frozen=True)
class Served:
    """How one engine takes the files of a layout.

    start: the lines that start it. rules: heads that it does not compute. caveats: what no file can settle, for those who
    start it. tested: whether an engine that is "run" was run with this layout, too.
    """

    start: Callable[[Serving], list[Snippet]]
    rules: tuple[Rule, ...]
    caveats: tuple[str, ...]
    tested: bool = True


@dataclass(frozen=True)
class Layout:
    """A way to write the heads of a method: the contract it must meet, how to convert to it and back, and what reads it.

    convert(head, target, request) -> files; load(path, target) -> head. engines: by their names in ENGINES; none where no
    engine known here reads it.
    """

    method: str
    contract: Contract
    convert: Callable[[Any, Target, ExportRequest], ModelFiles]
    load: Callable[[Path, Target], DraftHead]
    engines: Mapping[str, Served]

    def __post_init__(self) -> None:
        unknown = sorted(self.engines.keys() - ENGINES.keys())
        assert not unknown, f"the layout {self.contract.name} names {unknown}, which ENGINES does not have"

    @property
    def name(self) -> str:
        return self.contract.name

    def blocking_rule(self, engine: str, files: ModelFiles, target: Target, head: DraftHead) -> Rule | None:
        """Return the rule that keeps `engine` from serving these files, None where it serves them."""
        return next((rule for rule in self.engines[engine].rules if rule.found(files, target, head)), None)

    def refuse_what_engines_lack(self, files: ModelFiles, target: Target, head: DraftHead) -> None:
        """Raise UserError, naming the engine, why and what to do instead, where the layout's engine lacks something."""
        for engine, served in self.engines.items():
            for rule in served.rules:
                if rule.refused and rule.found(files, target, head):
                    raise UserError(
                        f"The layout {self.name} cannot hold this head: it has {rule.what}, and {ENGINES[engine].title} "
                        f"{rule.why}; {rule.instead}."
                    )

    def was_run(self, engine: str) -> bool:
        """Whether the engine itself has served heads of this layout, in scripts/test_engines.sh."""
        return ENGINES[engine].checked == "run" and self.engines[engine].tested


def layouts() -> dict[str, Layout]:
    """Return the layouts of draftsmith's own methods by name."""
    return {layout.name: layout for method in methods().values() for layout in method.layouts}


def layouts_of(method: str) -> dict[str, Layout]:
    """Return the layouts that hold heads of `method` by name, its default first; none for an unknown method.

    Raises UserError where a package brings one under a name of ours, or cannot be imported.
    """
    served = served_method(method)
    if not is_known(served):
        return {}
    found = {layout.name: layout for layout in find_method(served).layouts}
    if served not in methods() and (taken := sorted(found.keys() & layouts().keys())):
        raise UserError(f"The method {served!r} brings a layout named {taken[0]!r}, which draftsmith has: rename it.")
    return found


def default_layout(method: str) -> str:
    """Return the layout that heads of `method` are exported to by default. Raises UserError where there is none."""
    if not (names := list(layouts_of(method))):
        raise UserError(f"{method} heads cannot be exported yet: export one of another method.")
    return names[0]


def find_layout(name: str, method: str) -> Layout:
    """Return the layout of that name. Raises UserError for an unknown one and for one of another method."""
    known = layouts_of(method)
    if name not in known:
        default_layout(method)  # says so where there is none
        ours = layouts()
        what = f"holds {ours[name].method} heads, not {method}" if name in ours else "is unknown"
        raise UserError(f"export.layout is {name!r}, which {what}: choose one of {', '.join(known)}.")
    return known[name]
