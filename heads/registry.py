"""Methods by name: every folder of heads/ whose package names a METHOD, and those of installed packages.

A package elsewhere registers the same object: `mymethod = "mypackage.method:METHOD"` among its entry points of the group
draftsmith.methods. Modules of a method are imported only when they are asked for.
"""

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Protocol

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.heads.base import DraftHead
    from draftsmith.heads.target.target import Target


class Build(Protocol):
    """A new head with its initial weights."""

    def __call__(self, options: Any, target: "Target", draft_vocab: "Tensor | None") -> "DraftHead": ...


class Load(Protocol):
    """The head that `DraftHead.describe` and its layer_ids wrote down, weights still to be filled in."""

    def __call__(self, spec: dict[str, Any], target: "Target", draft_vocab: "Tensor | None") -> "DraftHead": ...


@dataclass(frozen=True)
class Method:
    """A drafter: where its parts are. package: `__name__` of the package or module that registers it.

    head, formats: modules; options, drafter, cost: "module:name". A module is one of the package, "" the package itself, one with
    a dot a full name.
    head has `build` and `load`. options is the dataclass of the recipe's `head:` section. drafter proposes with the head when
    decoding: a callable (head, num_speculative_tokens) -> Drafter, which also takes tree= and drawn= for the kinds of trees that
    `trees` names: static (children are the most likely tokens), drawn (a static tree whose children are drawn from the head's
    distribution) and dynamic. cost is what `draftsmith plan` computes with, a callable (options, TargetShape) -> HeadCost, None
    where nobody wrote its formulas. formats has LAYOUTS, what heads are exported to, and FORMATS, how folders of such heads are
    recognised; None where it has neither. served_as: the method that engines take a trained head for, "" for its own.
    launcher: the file in train/ that `accelerate launch` starts; head.py trains any.
    """

    package: str
    options: str
    drafter: str
    head: str = "head"
    cost: str | None = None
    formats: str | None = None
    trees: frozenset[str] = frozenset()
    served_as: str = ""
    launcher: str = "head.py"

    @property
    def options_class(self) -> type:
        """The dataclass of the recipe's `head:` section."""
        return self._resolve(self.options)

    @property
    def build(self) -> Build:
        return self._module(self.head).build

    @property
    def load(self) -> Load:
        return self._module(self.head).load

    @property
    def make_drafter(self) -> Callable[..., Any]:
        """The decoder's side of the method."""
        return self._resolve(self.drafter)

    @property
    def make_cost(self) -> Callable[..., Any] | None:
        """What computes the costs of training, None where nothing does."""
        return None if self.cost is None else self._resolve(self.cost)

    @property
    def layouts(self) -> tuple[Any, ...]:
        """The layouts that heads of the method are exported to, the default first."""
        return () if self.formats is None else getattr(self._module(self.formats), "LAYOUTS", ())

    @property
    def recognised(self) -> tuple[Any, ...]:
        """The formats by which folders of such heads are recognised."""
        return () if self.formats is None else getattr(self._module(self.formats), "FORMATS", ())

    def _module(self, name: str) -> Any:
        full = name if "." in name else f"{self.package}.{name}".removesuffix(".")
        return import_module(full)

    def _resolve(self, path: str) -> Any:
        module, _, name = path.partition(":")
        return getattr(self._module(module), name)


@functools.cache
def methods() -> dict[str, Method]:
    """Return draftsmith's own methods by name: the folders of heads/ whose `__init__` names a METHOD."""
    import draftsmith.heads

    packages = [info.name for info in pkgutil.iter_modules(draftsmith.heads.__path__) if info.ispkg]
    found = {name: getattr(import_module(f"draftsmith.heads.{name}"), "METHOD", None) for name in sorted(packages)}
    return {name: method for name, method in found.items() if isinstance(method, Method)}


GROUP = "draftsmith.methods"
"""The entry points by which installed packages add methods."""


def method_names() -> tuple[str, ...]:
    """Return the methods that recipes may name: our own and those of installed packages, which are not imported."""
    return (*methods(), *sorted(_installed()))


def find_method(name: str) -> Method:
    """Return the method of that name, from a package that is installed where it is not our own. Raises UserError for an
    unknown one, and for a package whose method cannot be used."""
    if name in methods():
        return methods()[name]
    installed = _installed()
    if name not in installed:
        raise UserError(f"The method {name!r} is unknown: choose one of {', '.join(sorted([*methods(), *installed]))}.")
    return _load(installed[name])


def served_method(name: str) -> str:
    """Return the method that engines take trained heads of the method `name` for; an unknown one stands for itself."""
    return (find_method(name).served_as if is_known(name) else "") or name


def is_known(name: str) -> bool:
    """Whether draftsmith or an installed package has a method of that name; packages are not imported."""
    return name in methods() or name in _installed()


def _installed() -> dict[str, metadata.EntryPoint]:
    """Return the methods of installed packages by name, none of them imported. Raises UserError where two have one
    name."""
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=GROUP):
        if point.name in methods() or point.name in found:
            other = f"the package {_package(found[point.name])} adds too" if point.name in found else "draftsmith has"
            raise UserError(
                f"The installed package {_package(point)} adds a method named {point.name!r}, which {other}: uninstall it, "
                "or give its method another name."
            )
        found[point.name] = point
    return found


def _load(point: metadata.EntryPoint) -> Method:
    """Import the method of an installed package, with all that it names."""
    told = f"The method {point.name!r} of the installed package {_package(point)}"
    try:
        method = point.load()
        sound = isinstance(method, Method)
        parts = (
            (method.options_class, method.build, method.load, method.make_drafter, method.make_cost) if sound else ()
        )
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{told} cannot be imported ({reason}): repair or uninstall the package.") from error
    if not parts:
        raise UserError(
            f"{told} is no Method of draftsmith.heads.registry but {type(method).__name__}: its entry point must name one."
        )
    if not is_dataclass(parts[0]):
        raise UserError(f"{told} has options that are no dataclass ({method.options}): make them one.")
    return method


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else point.module
