"""The stage that exports a trained head: it writes the directory that a serving engine loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.fields import fingerprint_fields
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import check_replaceable
from draftsmith.heads.export.export import convert_head, export_head, replaced_files
from draftsmith.heads.export.tuned import FOLDERS, check_tuned, write_adapter, write_merged
from draftsmith.heads.formats.contracts import target_reference
from draftsmith.heads.formats.engines import ENGINES
from draftsmith.heads.formats.layout import default_layout, layouts_of
from draftsmith.heads.formats.start import Adapter
from draftsmith.heads.record import read_record, warnings_for
from draftsmith.heads.target.identity import TargetIdentity, compare
from draftsmith.heads.target.target import Target
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.heads import find_head, head_digest, load_best
from draftsmith.stages.session import Session, say


def export_options(recipe: Recipe, method: str) -> dict[str, Any]:
    """Return the keyword arguments of `export_head` with which a recipe exports a head of `method`.

    A layout that the recipe names for its own method does not apply to a head of another method.
    """
    spec, layout = recipe.export, recipe.export.layout
    if layout in layouts_of(recipe.method) and layout not in layouts_of(method):
        layout = None
    return {
        "layout": layout or default_layout(method),
        "dtype": None if spec.dtype == "auto" else spec.dtype,
        "include_embeddings": spec.include_embeddings,
        "num_speculative_tokens": recipe.evaluate.num_speculative_tokens,
        "tensor_parallel": spec.tensor_parallel,
    }


def check_adapter(recipe: Recipe, head: DraftHead) -> None:
    """Raise UserError where `export.adapter` is set for a head without an adapter, or keeps one that no engine serves."""
    adapter = recipe.export.adapter
    if adapter is not None and not head.trains.tunes_target:
        raise UserError(f"export.adapter is {adapter!r}, but {head.method} heads come with no adapter: leave it out.")
    if adapter == "keep" and head.trains.tunes_target:
        layout = export_options(recipe, head.method)["layout"]
        serve = [
            name
            for name, known in layouts_of(head.method).items()
            if any(ENGINES[engine].serves_adapters for engine in known.engines)
        ]
        if layout not in serve:
            raise UserError(
                f"export.adapter is 'keep', but no engine that reads the layout {layout!r} drafts for a target with an "
                f"adapter: set export.layout to {' or '.join(serve)}, or leave export.adapter out."
            )


def export_stage(session: Session, head_folder: Path | None = None) -> Path:
    """Write the trained head as the directory that an engine loads, and check it by loading it again."""
    recipe, spec, target = session.recipe, session.recipe.export, session.target
    trained = load_best(recipe, target, head_folder)
    made_for = _made_for(session, head_folder)
    options = export_options(recipe, trained.method)
    destination = recipe.run_dir / "export" / options["layout"]
    head, tuned = _deployed(session, trained, destination)
    target = target if tuned is None else tuned.target
    inputs = {
        "head": head_digest(recipe, head_folder),
        "target": session.target.fingerprint,
        # What else the files hold of the target: its name, the dtype unless one is named, and with whole models the rest.
        "target.reference": target_reference(session.target),
        "target.dtype": session.target.dtype_name if spec.dtype == "auto" else None,
        "identity": {
            name: getattr(session.target.identity, name) for name in ("tokenizer", "chat_template", "eos_ids")
        },
        # Not the layout: one run may be exported for several engines.
        "export": fingerprint_fields(spec, ["layout"]),
        "num_speculative_tokens": options["num_speculative_tokens"],
    }
    files = convert_head(head, target, **options)  # refuses before an old export is removed
    if "export" not in session.redo and not (session.run.holds("export", inputs) and destination.exists()):
        check_replaceable(destination, replaced_files(destination, files))
        if tuned is not None:
            check_tuned(tuned.folder)
    if session.begin("export", inputs) and destination.exists() and (tuned is None or tuned.folder.exists()):
        return destination
    if tuned is not None:
        made_for = tuned.write(session.target, recipe.target.trust_remote_code)
        say(f"export: {tuned.folder}")
    note, adapter = ("", None) if tuned is None else (tuned.note, tuned.adapter)
    export_head(head, target, destination, made_for=made_for, target_note=note, adapter=adapter, **options)
    session.finish("export", {"folders": sorted(str(path) for path in destination.parent.iterdir() if path.is_dir())})
    say(f"export: {destination}")
    return destination


@dataclass(frozen=True)
class _Tuned:
    """A tuned target and how it is exported, into `folder`."""

    head: Any
    target: Target
    folder: Path
    kind: str

    @property
    def note(self) -> str:
        """What the README of the heads says about the tuned target."""
        if self.kind == "merge":
            return (
                f"These heads draft for the tuned target in `../{self.folder.name}`: serve that one, not the original."
            )
        return (
            f"These heads draft for the target with the adapter in `../{self.folder.name}`, not for the target alone."
        )

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that the target must be served with, None for a whole model."""
        return None if self.kind == "merge" else Adapter(str(self.folder.absolute()), self.head.tuned.spec.rank)

    def write(self, original: Target, trust_remote_code: bool) -> TargetIdentity:
        """Write the target or the adapter; return its identity, whose fingerprint the target then has too."""
        if self.kind == "merge":
            identity = write_merged(self.head.method, original, self.target, self.folder, trust_remote_code)
        else:
            identity = write_adapter(self.head.method, self.head.tuned, self.folder)
        self.target.fingerprint = identity.fingerprint or self.target.fingerprint
        return identity


def _deployed(session: Session, trained: DraftHead, destination: Path) -> tuple[DraftHead, _Tuned | None]:
    """Return the head as it drafts, and the target that was tuned with it (None where none was)."""
    check_adapter(session.recipe, trained)
    if not trained.trains.tunes_target:
        return trained, None
    original = session.target_in(session.recipe.export.dtype)
    head, kind = trained.deployed(original), session.recipe.export.adapter or "merge"
    target, folder = head.verifier(original), destination.parent / FOLDERS[kind]
    # What the heads' configuration names as their target.
    target.path = str(folder.absolute()) if kind == "merge" else target_reference(original)
    return head, _Tuned(head, target, folder, kind)


def _made_for(session: Session, head_folder: Path | None) -> TargetIdentity:
    """Return the target that the head's checkpoint records, for the record of the export.

    Warns where tokenizer, chat template or eos ids have changed since; other weights were refused before. What the
    checkpoint does not record is taken from the target at hand.
    """
    folder, now = find_head(session.recipe, head_folder), session.target.identity
    recorded = read_record(folder)
    if recorded is None:
        return now
    for text in warnings_for(folder, compare(recorded, now), recorded, session.target.path):
        session.warn(text)
    return recorded.completed(now)
