"""`draftsmith doctor --head H --target T`: does this head belong to this target? Neither is loaded as a model."""

from dataclasses import replace
from pathlib import Path

from draftsmith.cli.boundary import put
from draftsmith.cli.doctor import Check, table
from draftsmith.data.embedded import SHIPPED
from draftsmith.errors import UserError, one_line
from draftsmith.foreign.weights import read_header
from draftsmith.heads.files import all_weights_files, read_config, tensor_names
from draftsmith.heads.formats.recognise import is_head_config, recognise
from draftsmith.heads.record import RECORD, read_passport, read_record
from draftsmith.target.folder import hash_tokenizer, local_folder
from draftsmith.target.gguf_file import is_gguf, open_gguf
from draftsmith.target.identity import (
    CHANGES_OUTPUT,
    KINDS,
    SIZES,
    Difference,
    TargetIdentity,
    compare,
    identify_directory,
    not_compared,
)

FIELDS = {"template": "chat_template", "eos": "eos_ids"}
"""Where the name in a record is not that of the line."""
HARMLESS = ("eos",)
"""What is worth knowing, but changes neither acceptance nor texts on the way there."""


def run_fit(head_folder: Path, target: str) -> int:
    """Print a line for everything that tells targets apart; return 0 where the head fits, 1 where it does not.

    target: a folder, a Hub name or a GGUF file. Raises UserError for a head that is incomplete or of no known format, and for a target that is not there.
    """
    best = head_folder / "train" / "best"
    if not head_folder.is_dir():
        raise UserError(
            f"There is no folder {head_folder} for --head: give that of a checkpoint, a run, an export or a head."
        )
    folder = best if best.is_dir() else head_folder
    head = check_head(folder)
    if is_gguf(target):
        now = open_gguf(target).identity
    else:
        target_folder = find_target_folder(target)
        if target_folder.resolve() == folder.resolve():
            raise UserError(f"--head {folder} is the target itself: give the folder of what drafts for it.")
        now = identify_directory(target_folder, target)
    made_for = read_record(folder) or read_unrecorded(folder)
    if made_for.fingerprint is not None and made_for.fingerprint == now.fingerprint:  # which then holds for the parts
        parts = {kind: getattr(made_for, kind) or getattr(now, kind) for kind in CHANGES_OUTPUT}
        made_for = replace(made_for, **parts)
    differences, unknown = {one.kind: one for one in compare(made_for, now)}, not_compared(made_for, now)
    lines = [_line(kind, differences.get(kind), kind in unknown, made_for, now) for kind in KINDS]
    checks = [
        replace(one, detail=one_line(one.detail), fix=one_line(one.fix)) for one in (head, *_passport(folder), *lines)
    ]
    bad = [check.name for check in checks if check.state == "bad"]
    if len(unknown) == len(KINDS):
        verdict, code = f"Nothing is recorded that says whether {folder} fits {target}: measure it.", 1
    elif bad:
        verdict, code = f"{folder} was not made for {target} as it is now: {', '.join(bad)}.", 1
    else:
        verdict, code = f"{folder} fits {target}, as far as it is recorded.", 0
    put(f"{table(checks)}\n{verdict}")
    return code


def find_target_folder(target: str) -> Path:
    """Return a local folder, that of a Hub name in the cache, or the embedded target's. Raises UserError where no model is."""
    folder = SHIPPED if target == "embedded" else local_folder(target)
    if folder is None:
        raise UserError(
            f"--target {target} is neither a folder nor a Hub name in this machine's cache: check it, or fetch it first "
            f"(hf download {target})."
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"--target {target} has no config.json: give the folder that holds the model's files.")
    if is_head_config(folder / "config.json"):
        raise UserError(f"--target {target} is a draft head: give the model that it drafts for.")
    return folder


def check_head(folder: Path) -> Check:
    """Say what the head is. Raises UserError, in one sentence, for weights that are missing or cut short."""
    layout, files = recognise(folder), all_weights_files(folder)
    if not files:
        raise UserError(f"{folder} holds no weights: restore them, or fetch the whole head.")
    for file in files:
        if file.suffix == ".safetensors":
            read_header(file, "restore the head's weights, fetch them again or train again")
    tensor_names(folder)  # which reads a pickle, without running code
    size = sum(file.stat().st_size for file in files) / 2**20
    return Check("head", "ok", f"{layout.name}, complete, {size:.1f} MiB")


def _passport(folder: Path) -> list[Check]:
    """Return what the passport of an export says: whether its files are those that it was written for, how the head drafts, what it
    learned from and what was measured; nothing for a head without one."""
    passport = read_passport(folder)
    if passport is None or passport.head is None:
        return []
    head, fix = (
        passport.head,
        f"restore the export, export the head again, or remove {RECORD} and measure the head anew",
    )
    if changed := passport.changed(folder):
        files = Check("files", "bad", f"changed since the export: {', '.join(changed)}", fix)
    else:
        files = Check("files", "ok", f"{', '.join(passport.files)}: as draftsmith {passport.draftsmith} exported them")
    drafts = [
        f"reads the input of layers {', '.join(map(str, head.layer_ids))}" if head.layer_ids else "",
        f"reads the target's last state ({head.last_state})" if head.last_state else "",
        f"{head.attention} attention" if head.attention else "",
        f"a window of {head.window} tokens" if head.window else "",
        f"{head.draft_vocab_size} tokens to draft among" if head.draft_vocab_size else "",
        f"{passport.num_speculative_tokens} drafted tokens a round in {passport.dtype}",
    ]
    trained, taus = passport.trained, [(one, one.tau.get("overall")) for one in passport.measured]
    past = f"on {trained.answers:,} answers of up to {trained.longest:,} tokens" if trained else ""
    measured = ", ".join(
        f"{m.drafter} tau {tau:.2f} at temperature {m.temperature:g}" for m, tau in taus if tau is not None
    )
    return [
        files,
        Check("drafts", "ok", ", ".join(filter(None, drafts))),
        Check("trained", "ok" if past else "note", past or "not recorded with this head"),
        Check("measured", "ok" if measured else "note", measured or "no evaluation is recorded with this head"),
    ]


def read_unrecorded(folder: Path) -> TargetIdentity:
    """Return what a head without a record says of its target: a whole model its tokens, any other its sizes."""
    config = read_config(folder)
    if recognise(folder).whole:
        return TargetIdentity(vocab_size=config.get("vocab_size"), tokenizer=hash_tokenizer(folder))
    inner = config.get("transformer_layer_config")
    layer = inner if isinstance(inner, dict) else config
    hidden = config.get("target_hidden_size", layer.get("target_hidden_size", layer.get("hidden_size")))
    return TargetIdentity(vocab_size=layer.get("vocab_size"), hidden_size=hidden)


def _line(
    kind: str, difference: Difference | None, unknown: bool, made_for: TargetIdentity, now: TargetIdentity
) -> Check:
    """Return the line of a kind of difference: it fits, it differs and what that means, or it cannot be compared."""
    if difference is not None:
        state = "note" if kind in HARMLESS else "bad"
        return Check(kind, state, f"differs: the target has {difference.found}", difference.remedy)
    if not unknown:
        both = [name for name in SIZES if getattr(made_for, name) is not None and getattr(now, name) is not None]
        sizes = ", ".join(f"{getattr(now, name)} {SIZES[name]}" for name in both)
        return Check(kind, "ok", f"fits ({sizes})" if kind == "sizes" else "fits")
    recorded = None if kind == "sizes" else getattr(made_for, FIELDS.get(kind, kind))
    if recorded is None and not (kind == "weights" and made_for.fingerprint):
        return Check(kind, "note", "not recorded with this head")
    if getattr(now, FIELDS.get(kind, kind)) is None:
        return Check(kind, "note", "recorded, but the target's folder has no files for it")
    return Check(kind, "note", "recorded from other files than the target's folder has, which cannot be compared")
