"""The stages of a run: what they leave on disk, what run.json holds of them, and what changed since, in the keys that a user sets."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftsmith.eval.planner.decision import NAMES
from draftsmith.fields import shown
from draftsmith.heads.export.tuned import FOLDERS
from draftsmith.heads.formats.layout import layouts
from draftsmith.storage import sha256_file

STAGES = ("answers", "features", "train", "evaluate", "simulate", "export")

DATE = "data.date"
"""The input that says which day templates took for today, of stages whose texts tell it."""

FOLLOWERS = {
    "answers": STAGES,
    "features": STAGES[1:],
    "train": STAGES[2:],
    "evaluate": ("evaluate",),
    "simulate": ("simulate",),
    "export": ("export",),
}
"""The stages that are made again with a stage, itself included, as they were made from it."""
GROWN = "more data"
"""In place of a stage of --redo: only the data changed, and the new version takes what it can from the earlier one."""
DATA_STAGES = ("answers", "features")
"""The stages in a recipe's data_dir, which runs may share; the others are in the run directory."""

FILES = {
    "answers": ("answers.jsonl", "answers.jsonl.partial"),
    "features": ("features",),
    "train": ("train",),
    "evaluate": ("evaluation",),
    "simulate": ("simulation",),
    "export": ("export",),
}
"""What each stage leaves in the run directory, the finished thing first."""
WHOLE = {"answers": FILES["answers"], "features": ("index.json",)}
"""What says that an earlier version of a stage is in `.earlier` already, by any of these; else every file says it of itself."""
MORE = "answers.jsonl.more"
"""In `.earlier`, the answers of versions that came after the one there, and were not finished before the data changed again."""

KNOWN = {
    "answers": r"answers\.jsonl(\.partial|\.more|\.part-\d+-\d+)?",
    "features": r"features/(index\.json|target\.safetensors|(shards|samples|names|ids|masks|checksums)\.bin|shard-\d{5,}\.safetensors)",
    "train": r"train/(best|adapter|step_\d+(\.tmp)?|summary\.json|(metrics|dashboards)\.jsonl|(wandb|trackio|mlflow)(_id)?|tensorboard)",
    "evaluate": r"evaluation/(t[\d.e+-]+|report\.html|report\.md|costs\.json|plan\.json|routing\.json|settings)",
    "simulate": r"simulation/(t[\d.e+-]+|report\.html|report\.md)",
    "export": "export/(" + "|".join(map(re.escape, (*layouts(), *FOLDERS.values()))) + ")",
}
"""What each stage makes, as paths in the run directory: files, and folders that are its own with all that is in them."""

INSIDE = re.compile(
    r"train/(?!best/).*|train/best/(config\.json|model\.safetensors)"
    r"|(evaluation|simulation)/t[\d.e+-]+/(result\.json|parts\.journal)"
    rf"|evaluation/settings/[^/]+/({'|'.join(map(re.escape, NAMES))})"
    r"|export/[^/]+/(README\.md|parity/bundle\.json|(merges|vocab|added_tokens)\.txt|[^/.][^/]*\.(json|safetensors|gguf|pt|bin|jinja|model|py))"
)
"""What is made in these folders; in train all but the best head is Accelerate's and the dashboards'."""

MEASURED = ("evaluate", "simulate")
"""The stages whose files are made again, without asking, where they are damaged."""
LASTING = re.compile(
    r"^answers\.jsonl$|^features/|^train/((best|adapter)/|summary\.json)|/result\.json$|^export/.*\.(safetensors|json|pt|bin|gguf)$"
)
"""What must be there for a stage to be done: not its checkpoints and logs, nor reports and READMEs that are written anew."""
DIGESTED = 256 * 2**20
"""The most bytes of a file that is hashed whenever its stage is reused: a quarter of a second."""


@dataclass(frozen=True)
class StageRecord:
    """What run.json holds of a stage. inputs: the settings it was made from, flat. state: "running", "done", "removing", or "aside"
    where only its earlier version is there. earlier: the record of that one, whose files are in `.earlier` beside their places
    until the stage is done again. redo: the stage of --redo, with which it is put back, GROWN, or "" for never.
    facts: figures it reported (counts, seconds, tokens per second). files: path in the run directory -> size
    and, where that takes no time, SHA-256 of what it left; none in records of earlier versions. recipe: the whole recipe, flat, to
    tell by its keys what changed in inputs that are hashes; empty in records of earlier versions."""

    inputs: dict[str, Any]
    fingerprint: str
    state: str
    facts: dict[str, Any]
    files: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    earlier: dict[str, Any] | None = None
    redo: str = ""

    @property
    def there(self) -> bool:
        """Whether the stage has files of its own."""
        return self.state in ("running", "done")


def plain(record: StageRecord) -> dict[str, Any]:
    """Return a record as run.json holds it, without what only a stage that is made again has."""
    return {key: value for key, value in vars(record).items() if value or key not in ("earlier", "redo")}


def aside(known: dict[str, Any] | None, redo: str) -> StageRecord:
    """Return the record of a stage whose only version is set aside. known: that version's."""
    return StageRecord({}, "", "aside", {}, earlier=known, redo=redo)


def as_record(name: str, entry: Any) -> StageRecord:
    """Return an entry of run.json. Raises TypeError or ValueError for what is none."""
    record = StageRecord(**entry)
    if (
        name not in STAGES
        or not isinstance(record.inputs, dict)
        or not isinstance(record.facts, dict)
        or not isinstance(record.recipe, dict)
    ):
        raise ValueError(f"{name!r} is no stage with inputs and facts")
    if record.earlier is not None:
        as_record(name, record.earlier)
    if record.state not in ("running", "done", "removing", "aside") or not isinstance(record.fingerprint, str):
        raise ValueError(f"the stage {name!r} has the state {record.state!r}")
    files = {path: (int(size), digest) for path, (size, digest) in record.files.items()}
    if any(Path(path).is_absolute() or ".." in Path(path).parts for path in files):
        raise ValueError(f"the stage {name!r} names files outside the run")
    return replace(record, files=files)


def run_dir_of(recipe: dict[str, Any]) -> Path | None:
    """Return the run directory of a recipe in a record; None where the record is of an earlier version, and has none."""
    return Path(recipe.get("output_dir") or f"runs/{recipe['name']}") if "name" in recipe else None


def left_by(run: Path, entries: Iterable[Path]) -> dict[str, tuple[int, str | None]]:
    """Return the files that a finished stage is made of: their sizes, and digests where that takes no time."""
    lasting: dict[str, tuple[int, str | None]] = {}
    for entry in entries:
        for path in [entry] if entry.is_file() else sorted(entry.rglob("*")):
            name = path.relative_to(run).as_posix()
            if path.is_file() and LASTING.search(name):
                size = path.stat().st_size
                cheap = size <= DIGESTED and not name.startswith("features/shard")  # which has its own
                lasting[name] = (size, sha256_file(path) if cheap else None)
    return lasting


def flat_inputs(inputs: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return inputs as run.json keeps them, so that they compare equal: flat, by the dotted keys of recipes and overrides."""
    flat: dict[str, Any] = {}
    for key, value in inputs.items():
        if isinstance(value, dict) and value:
            flat |= flat_inputs(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(value, default=str))
    return flat


_TEMPLATE = ("data.template", "data.chat_template")
_PROMPTS = ("evaluate.prompts", "evaluate.per_slice", "evaluate.max_new_tokens", "evaluate.max_k", *_TEMPLATE)
_DATA = ("data.sources", "data.split", "data.slice", "data.limit")
_ANSWERS = (*_DATA, "data.max_length", *_TEMPLATE, "answers", "target", "seed")
_HASHES: dict[str, tuple[str, tuple[str, ...]]] = {
    "conversations": ("the conversations of data.sources", _DATA),
    "target": ("the model in target.path", ("target.path",)),
    "eos": ("the end tokens of the model in target.path", ("target.path",)),
    "tokenizer": ("the tokenizer or the chat template", ("target.path", "data.chat_template")),
    "identity": ("the tokenizer, chat template or end tokens of target.path", ("target.path",)),
    "original": ("the model that the target was tuned from", ("target.path",)),
    "answers": ("the answers", _ANSWERS),
    "features": ("the hidden states", (*_ANSWERS, "features", "head.layer_ids", "data.on_too_long")),
    "head": ("the head", ("method", "head", "train", "features", *_ANSWERS)),
    "beside": ("a head of evaluate.beside", ("evaluate.beside",)),
    "baselines": ("a draft model of evaluate.baselines", ("evaluate.baselines",)),
    "trees": ("a tree of evaluate.drafts", ("evaluate.drafts",)),
    "prompts": ("the prompts of evaluate.prompts", _PROMPTS),
    "references": ("the references of evaluate.prompts", _PROMPTS),
    "train.warm_start": ("the head in train.warm_start", ("train.warm_start",)),
    "head.init_from": ("the model in head.init_from", ("head.init_from",)),
}
"""What a record identifies by a hash: in words, and the keys of the recipe that decide it, or the sections of such keys."""
_GROUPS = ("identity", "beside", "baselines", "trees")
"""Those that hold a hash by name."""
MOST_CHANGES = 3


def tell_changes(
    was: Mapping[str, Any], now: Mapping[str, Any], recipe_was: Mapping[str, Any], recipe_now: Mapping[str, Any]
) -> str:
    """Return in words what differs between a stage's inputs, at most MOST_CHANGES of it; the method first, as options come with it.

    Inputs and recipes are flat, by dotted keys. A recipe that is not known, as in older records, is empty; what is identified by a
    hash is then called by name.
    """
    changed = sorted(differing(was, now) or was.keys() | now.keys(), key=lambda key: (key != "method", key))
    changes: dict[str, None] = {}
    for key in changed:
        name = next((group for group in _GROUPS if key.startswith(f"{group}.")), key)
        if name not in _HASHES:
            changes[_change(key, was, now)] = None
            continue
        what, decides = _HASHES[name]
        keys = differing(recipe_was, recipe_now) if recipe_was and recipe_now else []
        known = [one for one in keys if any(one == key or one.startswith(f"{key}.") for key in decides)]
        changes |= dict.fromkeys([_change(one, recipe_was, recipe_now) for one in known] or [f"{what} changed"])
    return "; ".join([*changes][:MOST_CHANGES])


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, sorted; one that is left out and an empty one are the same."""
    values = (
        {key: None if one.get(key) in ([], {}, "") else one.get(key) for key in was.keys() | now} for one in (was, now)
    )
    then, here = values
    return sorted(key for key in then if then[key] != here[key])


def _change(key: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return f"{key} was {shown(was.get(key))}, is {shown(now.get(key))}"
