"""Method name -> classes: one line per drafter, imported only when asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.heads.base import DraftHead
    from draftsmith.heads.target import Target


class Build(Protocol):
    """A new head with its initial weights."""

    def __call__(self, options: Any, target: "Target", draft_vocab: "Tensor | None") -> "DraftHead": ...


class Load(Protocol):
    """The head that `DraftHead.describe` and its layer_ids wrote down, weights still to be filled in."""

    def __call__(self, spec: dict[str, Any], target: "Target", draft_vocab: "Tensor | None") -> "DraftHead": ...


@dataclass(frozen=True)
class Method:
    """Where a drafter lives: `module` has `build` and `load`, the other two are "module:name".

    launcher is the file in train/ that `accelerate launch` starts, "" where training is not built yet. drafter names
    what proposes with the head when decoding: a callable (head, num_speculative_tokens) -> Drafter, which also takes
    tree= and drawn= for the kinds of trees that `trees` names: static (children are the most likely tokens), drawn (a
    static tree whose children are drawn from the head's law) and dynamic.
    """

    module: str
    options_path: str
    drafter_path: str | None = None
    launcher: str = ""
    trees: frozenset[str] = frozenset()

    @property
    def options(self) -> type:
        """The dataclass of the recipe's `head:` section."""
        return _resolve(self.options_path)

    @property
    def build(self) -> Build:
        return import_module(self.module).build

    @property
    def load(self) -> Load:
        return import_module(self.module).load

    @property
    def drafter(self) -> Callable[..., Any]:
        """The decoder's side of the method."""
        assert self.drafter_path is not None, f"no drafter is registered for {self.module}"
        return _resolve(self.drafter_path)


METHODS: dict[str, Method] = {
    "eagle1": Method(
        "draftsmith.heads.eagle1",
        "draftsmith.heads.eagle1_options:Eagle1Options",
        "draftsmith.heads.eagle_drafter:EagleDrafter",
        trees=frozenset({"static", "drawn", "dynamic"}),
    ),
    "eagle3": Method(
        "draftsmith.heads.eagle3",
        "draftsmith.heads.eagle3_options:Eagle3Options",
        "draftsmith.heads.eagle_drafter:EagleDrafter",
        "eagle.py",
        trees=frozenset({"static", "drawn", "dynamic"}),
    ),
    "medusa": Method(
        "draftsmith.heads.medusa",
        "draftsmith.heads.medusa_options:MedusaOptions",
        "draftsmith.heads.medusa_drafter:MedusaDrafter",
        "medusa.py",
        trees=frozenset({"static", "drawn"}),
    ),
}

TRAINED = tuple(name for name, method in METHODS.items() if method.launcher)
"""The methods that recipes may name."""


def find_method(name: str) -> Method:
    """Return the method of that name. Raises UserError for an unknown one."""
    if name not in METHODS:
        raise UserError(f"The method {name!r} is unknown: choose one of {', '.join(sorted(METHODS))}.")
    return METHODS[name]


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
