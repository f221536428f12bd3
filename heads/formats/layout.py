"""A layout: how heads of a method are written for engines, and how each engine takes the files.

A method's formats.py lists its layouts as LAYOUTS, the default first. A schema (schema.py) is about files alone; a
`Rule` is about a head that the files could hold and an engine would not compute. What heads several rules are about
stands at the end.

A draft may need of its target what enters its layers (`states`: EAGLE-3, P-EAGLE, DFlash, DSpark; `blocks`: Domino in SGLang), its embeddings and output
projection (`ends`: EAGLE-1 in SGLang) or an MTP layer in its files (`mtp`), and engines give these for some classes alone: targets.json lists them, by the names that
config.json has for them in `architectures`. `python -m scripts.bench.engines.targets` renews it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import gt, lt
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import EMBEDDING
from draftsmith.heads.formats.engines import ENGINES, SERVED, SPECULATORS_COMPLETE, Start, start_speculators
from draftsmith.heads.formats.published import is_the_same
from draftsmith.heads.formats.schema import ModelFiles, Schema, flatten
from draftsmith.heads.registry import find_method, is_known, methods, served_method
from draftsmith.target.gguf_file import is_gguf
from draftsmith.target.target import Target

TARGETS_FILE = Path(__file__).with_name("targets.json")
TARGETS: dict[str, dict[str, Any]] = json.loads(TARGETS_FILE.read_text(encoding="utf-8"))
"""By engine: its `version`, how it was `asked`, and by need the classes with it (`yes`), those without (`no`) and what holds for
`others`, null where that is not known."""
Condition = Callable[[ModelFiles, Target, DraftHead], bool]


@dataclass(frozen=True)
class Rule:
    """A head that an engine does not compute as it was trained.

    Attributes:
        what: The head, in a recipe's words.
        why: What the engine does with it; the text follows the engine's name.
        instead: What to do.
        applies: Whether a head is such a head, by its files, its target and itself.
        refused: True: no export. False: it is exported for other engines, and the README leaves this one out. None: True if this is the
            layout's only engine.
    """

    what: str
    why: str
    instead: str
    applies: Condition
    refused: bool | None = None


@dataclass(frozen=True)
class Served:
    """How one engine takes the files of a layout.

    Attributes:
        start: Returns the lines that start it.
        rules: Heads that it does not compute.
        caveats: What no file can settle, for those who start it.
        needs: What the drafts need of the target's class, see targets.json; "" where every class that is served will do.
        since: Its first version that reads the layout.
        until: Its last one.
        reserved: Words in the path of a draft that it takes for a method.
    """

    start: Start
    rules: tuple[Rule, ...] = ()
    caveats: tuple[str, ...] = ()
    needs: str = ""
    since: str = ""
    until: str = ""
    reserved: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Layout:
    """A way to write the heads of a method, and what reads it.

    Attributes:
        method: The method of the heads.
        schema: What the files hold, and how they are written.
        load: (path, target) -> the head in the folder `path`, fp32, on the target's device.
        engines: How each engine takes the files, by the names of ENGINES; none only for a layout of another package.
    """

    method: str
    schema: Schema
    load: Callable[[Path, Target], DraftHead]
    engines: Mapping[str, Served]

    def __post_init__(self) -> None:
        unknown = sorted(self.engines.keys() - ENGINES.keys())
        assert not unknown, f"the layout {self.schema.name} names {unknown}, which ENGINES does not have"

    @property
    def name(self) -> str:
        return self.schema.name

    def refuses(self, rule: Rule) -> bool:
        """Whether heads that a rule of one of the engines is about are not exported."""
        return len(self.engines) == 1 if rule.refused is None else rule.refused

    def blocking_rules(self, files: ModelFiles, target: Target, head: DraftHead) -> dict[str, Rule]:
        """Return by engine the rule that keeps it from serving these files; those that serve them are left out."""
        first = {
            engine: next((rule for rule in served.rules if rule.applies(files, target, head)), None)
            for engine, served in self.engines.items()
        }
        return {engine: rule for engine, rule in first.items() if rule is not None}

    def refuse_what_engines_lack(self, files: ModelFiles, target: Target, head: DraftHead) -> None:
        """Raise UserError, naming the engine, why and what to do instead, where the layout's engine lacks something."""
        for engine, served in self.engines.items():
            for rule in served.rules:
                if self.refuses(rule) and rule.applies(files, target, head):
                    raise UserError(
                        f"The layout {self.name} cannot hold this head: it has {rule.what}, and {ENGINES[engine].title} "
                        f"{rule.why}; {rule.instead}."
                    )

    def was_run(self, engine: str) -> bool:
        """Whether the engine itself, in some version, has served heads of this layout as we decode."""
        return any(served.get(self.name, False) for served in SERVED.get(engine, {}).values())


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
    known = {layout.name: layout for layout in find_method(served).layouts}
    if served not in methods() and (taken := sorted(known.keys() & layouts().keys())):
        raise UserError(f"The method {served!r} brings a layout named {taken[0]!r}, which draftsmith has: rename it.")
    return known


def default_layout(method: str, target: str = "") -> str:
    """Return the layout that heads of `method` are exported to by default: for a target in a GGUF file the one that llama.cpp reads,
    where there is one, as no other engine drafts for such a target. target: its path. Raises UserError where there is none."""
    if not (known := layouts_of(method)):
        raise UserError(f"{method} heads cannot be exported yet: export one of another method.")
    served = [name for name, layout in known.items() if is_gguf(target) and "llama_cpp" in layout.engines]
    return next(iter([*served, *known]))


def find_layout(name: str, method: str) -> Layout:
    """Return the layout of that name. Raises UserError for an unknown one and for one of another method."""
    known = layouts_of(method)
    if name not in known:
        default_layout(method)  # says so where there is none
        ours = layouts()
        what = f"holds {ours[name].method} heads, not {method}" if name in ours else "is unknown"
        raise UserError(f"export.layout is {name!r}, which {what}: choose one of {', '.join(known)}.")
    return known[name]


def has_flag(name: str) -> Condition:
    """Return whether a switch of config.json is on."""
    return lambda files, target, head: bool(flatten(files.config).get(name))


def changed_embedding(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    """Whether the head has other embeddings than the target's, of the same shape, in the dtype of the files and whatever these call
    them. Those of another shape engines cannot take from the target."""
    own = head.state_dict().get(EMBEDDING)
    if own is None or own.shape != target.embedding.shape:
        return False
    return not is_the_same(own.to(files.dtype), target.embedding)


def biased_target(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    """Whether the target's output projection has a bias."""
    return target.head.bias is not None


def more_than_a_matrix(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    """Whether the target's output projection has a bias, a scale or a softcap."""
    own = target.head
    return own.bias is not None or own.scale != 1.0 or own.softcap is not None


def served_by_speculators(width: str) -> Served:
    """Return how the speculators package takes its layout. width: the head that it does not compute, one of another width."""
    rule = Rule(
        width,
        "takes the draft to be as wide as the target",
        "serve it with vLLM, or leave head.hidden_size out",
        lambda files, target, head: flatten(files.config)["hidden_size"] != target.hidden_size,
    )
    return Served(start_speculators, rules=(rule,), caveats=(SPECULATORS_COMPLETE,))


def drafts_for(engine: str, needs: str, architectures: Sequence[str] | None) -> bool | None:
    """Return whether an engine gives drafts what they need of a target of one of these classes, None where that is not known.

    needs: a key of the engine's list; empty for drafts that need nothing of the class.
    """
    if not needs:
        return True
    classes = TARGETS.get(engine, {}).get(needs)
    if classes is None or not architectures:
        return None
    if any(name in classes["yes"] for name in architectures):
        return True
    return False if all(name in classes["no"] for name in architectures) else classes["others"]


def target_obstacle(layout: Layout, engine: str, target: str, architectures: Sequence[str] | None) -> str | None:
    """Return why `engine` drafts with no head of this layout for such a target and what to do instead, None where it does or nobody
    knows. target: its path; architectures: of its config.json. The text follows the engine's name."""
    if is_gguf(target) and (why := ENGINES[engine].no_gguf) is not None:
        return f"{why}; start it on the model that the file was made from, and measure the head on that"
    if drafts_for(engine, layout.engines[engine].needs, architectures) is not False:
        return None
    return f"drafts with such heads for no target of the class {_named(architectures)}; {_elsewhere(layout, architectures)}"


def engines_notice(
    layout: Layout, target: str, architectures: Sequence[str] | None, blocked: Mapping[str, str] | None = None
) -> str | None:
    """Return a sentence that says before training which engines of a layout will not draft for such a target, None where all do as
    far as anybody knows. blocked: why engines do not serve the head itself; said where no engine is left."""
    serving = [engine for engine in layout.engines if ENGINES[engine].split is not None]
    obstacles = {e: target_obstacle(layout, e, target, architectures) or (blocked or {}).get(e) for e in serving}
    known = {e: drafts_for(e, layout.engines[e].needs, architectures) for e in serving}
    refused = joined([f"{ENGINES[e].title} {ENGINES[e].version}" for e in serving if known[e] is False])
    kind, none_left = _named(architectures), bool(serving) and all(obstacles.values())
    if none_left and not all(good is False for good in known.values()):
        reasons = "; ".join(f"{ENGINES[engine].title} {why}" for engine, why in obstacles.items())
        return f"no engine that reads the layout {layout.name} serves this head: {reasons}."
    if not refused:
        return None
    instead = _elsewhere(layout, architectures)
    if none_left:
        what = f"no engine that reads the layout {layout.name} drafts with such heads for a target of the class {kind}"
        return f"{what} ({refused}): {instead}."
    unknown = joined([ENGINES[e].title for e in serving if known[e] is None])
    others = f", and of {unknown} it is not known" if unknown else ""
    return f"in the layout {layout.name} such heads draft for no target of the class {kind} in {refused}{others}: {instead}."


def _elsewhere(layout: Layout, architectures: Sequence[str] | None) -> str:
    """Say what serves a target that an engine of this layout gives no drafts: another engine, or another method."""
    by_layout: dict[str, list[str]] = {}
    for other in (layout, *layouts_of(layout.method).values()):
        for engine, served in other.engines.items():
            title = ENGINES[engine].title
            serves = ENGINES[engine].split is not None and drafts_for(engine, served.needs, architectures)
            if serves and not any(title in titles for titles in by_layout.values()):
                by_layout.setdefault(other.name, []).append(title)
    ways = [
        f"{'serve it with' if name == layout.name else f'export the layout {name} for'} {joined(titles, 'or')}"
        for name, titles in by_layout.items()
    ]
    if not ways:
        draft = layouts()["draft_model"].engines
        able = [ENGINES[e].title for e in draft if ENGINES[e].split is not None]
        ways = [f"train the method draft_model, which {joined(able)} serve for any class of targets"]
    return ", or ".join(ways)


def version_notice(layout: Layout, engine_version: str) -> str | None:
    """Return a sentence where an engine of that version does not read a layout, or was run with it and drafted otherwise; None where it
    serves it as far as anybody knows.

    engine_version: ENGINE=VERSION. Raises UserError where it is not that, and where no version of the engine reads the layout.
    """
    engine, _, version = engine_version.partition("=")
    if not (numbers := re.findall(r"\d+", version)):
        raise UserError(
            f"export.engine_version is {engine_version!r}: name the engine and its version, such as vllm=0.33.0."
        )
    if (served := layout.engines.get(engine)) is None:
        raise UserError(
            f"export.engine_version is {engine_version!r}, but the layout {layout.name} is read by "
            f"{joined(list(layout.engines), 'or')}: name that engine, or set export.layout."
        )

    title = ENGINES[engine].title
    if SERVED.get(engine, {}).get(version, {}).get(layout.name) is False:
        return f"{title} {version} was run with heads of the layout {layout.name} and did not serve them as they are decoded here: see docs/engines.md."

    def order(bound: str) -> tuple[list[int], list[int]]:
        known = [int(number) for number in bound.split(".")]
        return [int(number) for number in numbers[: len(known)]], known

    early, late = (
        bool(bound) and compare(*order(bound)) for bound, compare in ((served.since, lt), (served.until, gt))
    )
    if not early and not late:
        return None
    bound = f"from {served.since} on" if early else f"up to {served.until}"
    return f"{title} {version} does not load the layout {layout.name}, which {title} reads {bound}: serve it with such a version."


def _named(architectures: Sequence[str] | None) -> str:
    return joined(list(architectures or ()), "or")


def joined(words: Sequence[str], last: str = "and") -> str:
    """Return words as a list in a sentence."""
    return f" {last} ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), *words[-1:]])
