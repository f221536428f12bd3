"""Find methods by name: the folders of heads/ whose `__init__` defines a METHOD, and those of installed packages.

A package elsewhere registers the same object: `mymethod = "mypackage.method:METHOD"` among its entry points of the group
draftsmith.methods. The modules of a method are imported when they are first used.
"""

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from importlib import import_module, metadata
from inspect import signature
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from draftsmith.heads.base import DraftHead
    from draftsmith.target.target import Target


@dataclass(frozen=True)
class Method:
    """Where the parts of a method are.

    head and formats name modules; options and drafter are of the form "module:name". Modules are those of
    `package`; "" is the package itself, and a name with a dot is a full one.
    """

    package: str
    """`__name__` of the package or module that registers the method."""
    options: str
    """The dataclass of the recipe's `head:` section."""
    drafter: str
    """A callable (head, num_speculative_tokens) -> Drafter, which proposes with the head when decoding. For the kinds
    of trees that `trees` names it also takes tree= and drawn=, and rule= where its chains may end early."""
    head: str = "head"
    """The module with `build` and `load`."""
    formats: str | None = None
    """The module with LAYOUTS (what heads are exported to) and FORMATS (how folders of such heads are recognised);
    either may be missing. None: both are."""
    trees: frozenset[str] = frozenset()
    """The kinds of trees it drafts: static (children are the most likely tokens), drawn (a static tree whose children
    are drawn from the head's probabilities), dynamic (EAGLE-2's) and best_first (that and accum_logp, see `DynamicTree`)."""
    served_as: str = ""
    """The method that engines take a trained head for; "": its own."""
    launcher: str = "head.py"
    """The file in train/ that `accelerate launch` starts; head.py trains every method."""
    layers: bool | str = True
    """Whether making or training a head takes the target's layers, also where its hidden states are stored; a name is that of the
    option with which it does. False: what it asks of them are the states of `probe_ids`."""

    def needs_layers(self, options: Any) -> bool:
        """Whether a head with these options takes the target's layers."""
        return bool(getattr(options, self.layers)) if isinstance(self.layers, str) else self.layers

    def trees_of(self, options: Any) -> frozenset[str]:
        """Return the kinds of trees that a head with these options drafts: those of `trees`, or none where its options name one (`chains_alone`) with
        which it drafts chains alone."""
        return frozenset() if getattr(options, "chains_alone", "") else self.trees

    @property
    def ends_chains(self) -> bool:
        """Whether its drafter takes a `rule` that ends chains early."""
        return "rule" in signature(self.make_drafter).parameters

    @property
    def options_class(self) -> type:
        """The dataclass of the recipe's `head:` section."""
        return self._resolve(self.options)

    @property
    def build(self) -> "Callable[[Any, Target, Tensor | None], DraftHead]":
        """(options, target, draft_vocab, see `DraftHead`) -> a new head with its initial weights."""
        return self._module(self.head).build

    @property
    def load(self) -> "Callable[[dict[str, Any], Target, Tensor | None], DraftHead]":
        """(`DraftHead.describe` and `layer_ids` of a checkpoint's config, target, draft_vocab) -> that head, whose weights are
        filled in after."""
        return self._module(self.head).load

    @property
    def make_drafter(self) -> Callable[..., Any]:
        """The callable that makes a drafter of a head."""
        return self._resolve(self.drafter)

    @property
    def layouts(self) -> tuple[Any, ...]:
        """The layouts that heads of the method are exported to, the default first."""
        return () if self.formats is None else getattr(self._module(self.formats), "LAYOUTS", ())

    @property
    def recognised(self) -> tuple[Any, ...]:
        """The formats by which folders of the method's heads are recognised."""
        return () if self.formats is None else getattr(self._module(self.formats), "FORMATS", ())

    def _module(self, name: str) -> Any:
        full = name if "." in name else f"{self.package}.{name}".removesuffix(".")
        return import_module(full)

    def _resolve(self, path: str) -> Any:
        module, _, name = path.partition(":")
        return getattr(self._module(module), name)


def own_method(package: str, options: str, drafter: str, **others: Any) -> Method:
    """Return a method of heads/, whose layouts are in its formats.py, and which asks the target for states alone if nothing else is
    said."""
    return Method(package, options, drafter, **{"formats": "formats", "layers": False, **others})


@functools.cache
def methods() -> dict[str, Method]:
    """Return draftsmith's own methods by name: the folders of heads/ whose `__init__` defines a METHOD."""
    import draftsmith.heads

    packages = [info.name for info in pkgutil.iter_modules(draftsmith.heads.__path__) if info.ispkg]
    declared = {name: getattr(import_module(f"draftsmith.heads.{name}"), "METHOD", None) for name in sorted(packages)}
    return {name: method for name, method in declared.items() if isinstance(method, Method)}


GROUP = "draftsmith.methods"
"""The group of entry points by which installed packages add methods."""


def method_names() -> tuple[str, ...]:
    """Return the names that recipes may use: our own methods and those of installed packages, which are not
    imported."""
    return (*methods(), *sorted(_installed()))


def find_method(name: str) -> Method:
    """Return the method of that name, our own or that of an installed package. Raises UserError for an unknown name,
    and for a package whose method cannot be used."""
    if name in methods():
        return methods()[name]
    installed = _installed()
    if name not in installed:
        raise UserError(f"The method {name!r} is unknown: choose one of {', '.join(sorted([*methods(), *installed]))}.")
    return _load(installed[name])


def served_method(name: str) -> str:
    """Return the method that engines take trained heads of the method `name` for; an unknown name is returned as it
    is."""
    return (find_method(name).served_as if is_known(name) else "") or name


def is_known(name: str) -> bool:
    """Return whether draftsmith or an installed package has a method of that name; packages are not imported."""
    return name in methods() or name in _installed()


def _installed() -> dict[str, metadata.EntryPoint]:
    """Return the entry points of installed packages' methods by name. Raises UserError where two have the same name."""
    points: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=GROUP):
        if point.name in methods() or point.name in points:
            other = f"the package {_package(points[point.name])} adds too" if point.name in points else "draftsmith has"
            raise UserError(
                f"The installed package {_package(point)} adds a method named {point.name!r}, which {other}: uninstall it, "
                "or give its method another name."
            )
        points[point.name] = point
    return points


def _load(point: metadata.EntryPoint) -> Method:
    """Import the method of an installed package with all its parts. Raises UserError where one cannot be used."""
    named = f"The method {point.name!r} of the installed package {_package(point)}"
    try:
        method = point.load()
        sound = isinstance(method, Method)
        parts = (method.options_class, method.build, method.load, method.make_drafter) if sound else ()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{named} cannot be imported ({reason}): repair or uninstall the package.") from error
    if not parts:
        raise UserError(
            f"{named} is no Method of draftsmith.heads.registry but {type(method).__name__}: its entry point must name one."
        )
    if not is_dataclass(parts[0]):
        raise UserError(f"{named} has options that are no dataclass ({method.options}): make them one.")
    return method


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else point.module
