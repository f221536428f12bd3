"""Method name -> classes: one line per drafter, imported only when asked for; installed packages add theirs.

A package that has `mymethod = "mypackage.method:METHOD"` among its entry points of the group draftsmith.methods, the
object a `Method`, has a drafter like those here.
"""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from importlib import import_module, metadata
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
    """Where a drafter lives: `module` has `build` and `load`, the others are "module:name".

    drafter names what proposes with the head when decoding: a callable (head, num_speculative_tokens) -> Drafter, which
    also takes tree= and drawn= for the kinds of trees that `trees` names: static (children are the most likely tokens),
    drawn (a static tree whose children are drawn from the head's law) and dynamic. launcher is the file in train/ that
    `accelerate launch` starts, "" where training is not built yet; head.py trains any. cost names what `draftsmith plan`
    computes with, a callable (options, TargetShape) -> HeadCost of draftsmith.head_costs, None where nobody wrote it.
    served_as: the method that engines take a trained head for, "" for its own: its layouts hold it. layouts names what
    heads are exported to beside the layouts of heads/export.py, a tuple of its `Layout`: a package brings its own.
    """

    module: str
    options_path: str
    drafter_path: str | None = None
    launcher: str = "head.py"
    trees: frozenset[str] = frozenset()
    cost_path: str | None = None
    served_as: str = ""
    layouts_path: str | None = None

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

    @property
    def cost(self) -> Callable[..., Any] | None:
        """What computes the costs of training, None where nothing does."""
        return None if self.cost_path is None else _resolve(self.cost_path)

    @property
    def layouts(self) -> tuple[Any, ...]:
        """The layouts that come with the method."""
        return () if self.layouts_path is None else _resolve(self.layouts_path)


METHODS: dict[str, Method] = {
    "dflash": Method(
        "draftsmith.heads.dflash",
        "draftsmith.heads.dflash_options:DFlashOptions",
        "draftsmith.heads.block_drafter:DFlashDrafter",
        trees=frozenset({"static", "drawn"}),
        cost_path="draftsmith.head_costs_block:DFlashCost",
    ),
    "draft_model": Method(
        "draftsmith.heads.draft_lm",
        "draftsmith.heads.draft_lm_options:DraftLmOptions",
        "draftsmith.heads.draft_lm_drafter:DraftLmDrafter",
        cost_path="draftsmith.head_costs_draft_lm:DraftLmCost",
    ),
    "dspark": Method(
        "draftsmith.heads.dspark",
        "draftsmith.heads.dspark_options:DSparkOptions",
        "draftsmith.heads.dspark_drafter:DSparkDrafter",
        cost_path="draftsmith.head_costs_block:DSparkCost",
    ),
    "eagle1": Method(
        "draftsmith.heads.eagle1",
        "draftsmith.heads.eagle1_options:Eagle1Options",
        "draftsmith.heads.eagle_drafter:EagleDrafter",
        "eagle.py",
        trees=frozenset({"static", "drawn", "dynamic"}),
        cost_path="draftsmith.head_costs:Eagle1Cost",
    ),
    "eagle3": Method(
        "draftsmith.heads.eagle3",
        "draftsmith.heads.eagle3_options:Eagle3Options",
        "draftsmith.heads.eagle_drafter:EagleDrafter",
        "eagle.py",
        trees=frozenset({"static", "drawn", "dynamic"}),
        cost_path="draftsmith.head_costs_fused:Eagle3Cost",
    ),
    "hydra": Method(
        "draftsmith.heads.hydra",
        "draftsmith.heads.hydra_options:HydraOptions",
        "draftsmith.heads.hydra_drafter:HydraDrafter",
        trees=frozenset({"static", "drawn"}),
        cost_path="draftsmith.head_costs_hydra:HydraCost",
    ),
    "medusa": Method(
        "draftsmith.heads.medusa",
        "draftsmith.heads.medusa_options:MedusaOptions",
        "draftsmith.heads.medusa_drafter:MedusaDrafter",
        "medusa.py",
        trees=frozenset({"static", "drawn"}),
        cost_path="draftsmith.head_costs:MedusaCost",
    ),
    "medusa2": Method(
        "draftsmith.heads.medusa2",
        "draftsmith.heads.medusa2_options:Medusa2Options",
        "draftsmith.heads.medusa_drafter:MedusaDrafter",
        "medusa.py",
        trees=frozenset({"static", "drawn"}),
        cost_path="draftsmith.head_costs_medusa2:Medusa2Cost",
        served_as="medusa",
    ),
    "peagle": Method(
        "draftsmith.heads.peagle",
        "draftsmith.heads.peagle_options:PEagleOptions",
        "draftsmith.heads.peagle_drafter:PEagleDrafter",
        trees=frozenset({"static", "drawn"}),
        cost_path="draftsmith.head_costs_peagle:PEagleCost",
    ),
}

TRAINED = tuple(name for name, method in METHODS.items() if method.launcher)
"""The methods of draftsmith's own that recipes may name."""

GROUP = "draftsmith.methods"
"""The entry points by which installed packages add methods."""


def trained_names() -> tuple[str, ...]:
    """Return the methods that recipes may name: our own and those of installed packages, which are not imported."""
    return (*TRAINED, *sorted(_installed()))


def find_method(name: str) -> Method:
    """Return the method of that name, from a package that is installed where it is not our own. Raises UserError for an
    unknown one, and for a package whose method cannot be used."""
    if name in METHODS:
        return METHODS[name]
    installed = _installed()
    if name not in installed:
        raise UserError(f"The method {name!r} is unknown: choose one of {', '.join(sorted([*METHODS, *installed]))}.")
    return _load(installed[name])


def served_method(name: str) -> str:
    """Return the method that engines take trained heads of the method `name` for; an unknown one stands for itself."""
    return (find_method(name).served_as if is_known(name) else "") or name


def brought_layouts(name: str) -> tuple[Any, ...]:
    """Return the layouts that come with a method of another package; none for an unknown method."""
    return find_method(name).layouts if is_known(name) else ()


def is_known(name: str) -> bool:
    """Whether draftsmith or an installed package has a method of that name; packages are not imported."""
    return name in METHODS or name in _installed()


def _installed() -> dict[str, metadata.EntryPoint]:
    """Return the methods of installed packages by name, none of them imported. Raises UserError where two have one
    name."""
    found: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=GROUP):
        if point.name in METHODS or point.name in found:
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
        parts = (method.options, method.build, method.load, method.drafter, method.cost) if sound else ()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{told} cannot be imported ({reason}): repair or uninstall the package.") from error
    if not parts:
        raise UserError(
            f"{told} is no Method of draftsmith.heads.registry but {type(method).__name__}: its entry point must name one."
        )
    if not is_dataclass(parts[0]):
        raise UserError(f"{told} has options that are no dataclass ({method.options_path}): make them one.")
    return method


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
