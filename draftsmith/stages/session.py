"""A recipe being run: its run directory, what several stages load only once, the device, and the processes that share it."""

import gc
import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import draftsmith
from draftsmith.data.conversations.day import prints_date, set_day
from draftsmith.data.conversations.load import Conversation, load_conversations
from draftsmith.data.conversations.templates import (
    check_template_keys,
    check_tokenizer,
    load_tokenizer,
    template_name,
)
from draftsmith.data.embedded import EmbeddedDefault, ensure_embedded
from draftsmith.data.team import Alone, Groups, Team
from draftsmith.errors import UserError
from draftsmith.heads.base import layer_ids_of
from draftsmith.heads.formats.engines import Again
from draftsmith.heads.formats.recognise import refuse_head
from draftsmith.heads.layers.from_target import final_norm_weight
from draftsmith.heads.record import tuned_from
from draftsmith.heads.registry import find_method
from draftsmith.heads.warm_start import adopt_options
from draftsmith.machine import keep_freed_memory
from draftsmith.progress import hush, say, warn_anew
from draftsmith.recipe.record import DATA_STAGES, DATE, STAGES
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.drafters import WARM_START, find_head, load_warm
from draftsmith.stages.run import RunDirectory
from draftsmith.storage import fingerprint
from draftsmith.target.folder import fingerprint_directory
from draftsmith.target.identity import TargetIdentity
from draftsmith.target.parts import PARTS, SharedTarget, TargetParts, open_parts
from draftsmith.target.pretrained import weights_directory
from draftsmith.target.target import Target, describe_context
from draftsmith.train.meeting import meeting
from draftsmith.train.process import world


class Session:
    """A recipe, its run directory, and what several stages load only once.

    redo: stages to make again. head: the folder of the head to measure or export, or of its run; None for this run's own.
    training: nothing comes after the training. processes: that train, or make the data. again: how its command is given again: the folder, and the words that name the recipe.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        redo: set[str] | None = None,
        head: Path | None = None,
        words: Sequence[str] = (),
        training: bool = False,
    ) -> None:
        warn_anew()
        self.recipe, self.named_head, self._training = recipe, head, training
        self.again = Again(str(Path.cwd()), tuple(words)) if words else Again()
        self.processes = world().size
        # Stages to remove when they begin; each once, and by one process only.
        self.redo = set(redo or ()) if world().main else set()
        self.run = RunDirectory(recipe.run_dir, recipe=recipe)
        shared = recipe.data_path.resolve() != recipe.run_dir.resolve()
        self.data = RunDirectory(recipe.data_path, DATA_STAGES, recipe) if shared else self.run
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Print what makes results doubtful, once, and keep it for result.json."""
        if text not in self.warnings:
            self.warnings.append(text)
            say(f"warning: {text}")

    @cached_property
    def device(self) -> str:
        """The device that the recipe names; auto takes a GPU if there is one."""
        return choose_device(self.recipe.target.device)

    @cached_property
    def embedded(self) -> EmbeddedDefault:
        """The embedded default, whose texts are unpacked on first use."""
        return ensure_embedded()

    @property
    def head_folder(self) -> Path:
        """The folder of the head to measure or export. Raises UserError where there is none, or one that cannot be loaded."""
        return find_head(self.recipe, self.named_head)

    @property
    def target_path(self) -> str:
        """Folder, Hub name or GGUF file of the target."""
        path = self.recipe.target.path
        return str(self.embedded.target) if path == "embedded" else path

    def target_in(self, dtype: str) -> Target:
        """Return the session's own target where that is in `dtype` (or it is "auto"), else load one."""
        return self.target if dtype in ("auto", self.target.dtype_name) else self.load_target(dtype)

    def load_target(self, dtype: str, path: str | None = None) -> Target:
        """Load the target, or the model in `path` with the same settings, and check that the decoder runs it exactly."""
        if (gpus := self.recipe.target.gpus) > 1 and world().size > 1:
            raise UserError(
                f"target.gpus is {gpus}, but {world().size} processes have a GPU each: start one, or train from a finished store, for "
                "which no layers are loaded."
            )
        own = {"path": path or self.target_path, "dtype": dtype, "device": self.device}
        if shared := self.recipe.target.shared:
            recipe, processes = self.recipe, self.recipe.target.tensor_parallel
            if find_method(recipe.method).needs_layers(recipe.head):
                raise UserError(
                    f"target.tensor_parallel is {processes}, but heads of method: {recipe.method} take the target's layers whole: set "
                    "target.gpus in its place."
                )
            if world().size == 1:
                raise UserError(
                    f"target.tensor_parallel is {processes}, but this is one process: `draftsmith run`, `regenerate`, `extract`, `train` and "
                    "`evaluate` take --launch or torchrun; for all else set target.gpus in its place."
                )
            own["device"] = torch.device(self.device).type  # the GPU of this process
        target = draftsmith.load_target(**asdict(self.recipe.target) | own)
        self._tell_context(target)
        return SharedTarget(target, final_norm_weight(target), team().tell) if shared else target

    def share_target(self) -> None:
        """Load a target that processes share, which all of them do at once. Then one alone may look at it, but for passes."""
        if self.recipe.target.shared:
            # As rank 0 decides, who alone knows what is to be made again.
            stored = team().tell(lambda: self._target_of_store() is not None)
            parts = self._target_of_store() if stored else None
            self.__dict__["target"] = parts or self.load_target(self.recipe.target.dtype)

    def _tell_context(self, target: Target) -> None:
        if (words := describe_context(target.config)) != str(target.context_length):
            self.warn(
                f"the context of {target.path} ends at {words}; how engines continue longer texts is not measured here: "
                "keep those that you serve within it, and data.max_length too."
            )

    @cached_property
    def target(self) -> Target:
        """The target in the dtype for answers and hidden states, without its layers where a finished store is all that is left to
        read (see `load_layers`)."""
        if (parts := self._target_of_store()) is not None:
            self._tell_context(parts)
            return parts
        return self.load_target(self.recipe.target.dtype)

    def _target_of_store(self) -> Target | None:
        """Open the target of a finished store, from which this session only trains; None where its layers are needed."""
        recipe = self.recipe
        needed = not self._training or find_method(recipe.method).needs_layers(recipe.head)
        if needed or recipe.features.source != "store" or self.redo & set(DATA_STAGES):
            return None
        if (record := self.data.record("features")) is None or record.state != "done":
            return None
        settings = {key: getattr(recipe.target, key) for key in ("dtype", "attn_implementation", "trust_remote_code")}
        folder = recipe.data_path / "features" / PARTS
        parts = open_parts(self.target_path, folder, device=self.device, **settings)
        # A head that reads other layers than the store has is told of by what needs them.
        return parts if parts and parts.layer_ids.issuperset(layer_ids_of(recipe.head, parts)) else None

    def load_layers(self) -> None:
        """Load the whole target, where `target` is without its layers."""
        if isinstance(self.target, TargetParts):
            self.drop_target()
            self.__dict__["target"] = self.load_target(self.recipe.target.dtype)

    def drop_target(self) -> None:
        """Free the target's memory for processes that load their own copy; the next use here loads it again."""
        self.__dict__.pop("target", None)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @cached_property
    def original(self) -> TargetIdentity | None:
        """The original that a target which was tuned with its heads is compared with; None for any other target.

        Also None, with a warning in the results, where the original cannot be compared or the recipe does not want it.
        """
        made_from = tuned_from(Path(self.target_path))
        if made_from is None:
            return None
        remedy = "put it back there"
        if not self.recipe.evaluate.original:
            why, remedy = "evaluate.original is false", "set it to true"
        elif made_from.path is None or (Path(made_from.path).is_absolute() and not Path(made_from.path).exists()):
            why = "it is not there any more"
        else:
            try:
                if fingerprint_directory(weights_directory(made_from.path)) == made_from.fingerprint:
                    return made_from
                why = "another model lies there now"
            except (OSError, UserError):
                why = "it cannot be read any more"
        self.warn(
            f"the target {self.target_path} was tuned together with heads, and is not compared with the original "
            f"({made_from.path}), as {why}: speed here is relative to the tuned target, and what the tuning changed is in "
            f"the report of the run that tuned it; to compare them here, {remedy}."
        )
        return None

    def original_of(self, target: Target) -> Target:
        """Return what answers alone in an evaluation of `target`: the original, in the same dtype, where that is compared."""
        return target if self.original is None else self.load_target(target.dtype_name, self.original.path)

    def name_of(self, target: Target) -> str:
        """Return how results name a target: the session's own as the recipe does."""
        return self.recipe.target.path if target.path == self.target_path else target.path

    @cached_property
    def unchecked_tokenizer(self) -> Any:
        """The target's tokenizer with the chat template, for which the target itself is not loaded."""
        refuse_head(self.target_path)  # which has no tokenizer
        recipe = self.recipe
        tokenizer = load_tokenizer(self.target_path, recipe.target.trust_remote_code, recipe.data.chat_template)
        if prints_date(tokenizer):
            set_day(tokenizer, date.fromisoformat(self.day))
        elif recipe.data.date is not None:
            raise UserError(
                f"data.date is {recipe.data.date}, but the {template_name(tokenizer)} prints no date: leave it out."
            )
        return tokenizer

    @cached_property
    def day(self) -> str:
        """The day that templates take for today: the recipe's, else that on which the first stage of the run began."""
        known = (d.record(stage) for d in (self.data, self.run) for stage in STAGES)
        days = (record.inputs.get(DATE) for record in known if record is not None)
        return self.recipe.data.date or next(filter(None, days), None) or datetime.now(UTC).date().isoformat()

    @property
    def dated(self) -> dict[str, str]:
        """What a stage whose texts tell the date depends on besides, as run.json records it."""
        return {DATE: self.day} if prints_date(self.unchecked_tokenizer) else {}

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, checked against its vocabulary."""
        check_tokenizer(self.unchecked_tokenizer, self.target.vocab_size)
        check_template_keys(self.unchecked_tokenizer, self.recipe.data.template)
        return self.unchecked_tokenizer

    def sources(self, key: str, named: Sequence[str], what: str) -> list[str]:
        """Return the files that a recipe names under `key`, else those of the embedded default; `what` says what to name."""
        if named:
            return list(named)
        if self.recipe.target.path != "embedded":
            raise UserError(f"{key} is empty: {what}.")
        return [str(self.embedded.conversations if key == "data.sources" else self.embedded.prompts)]

    @cached_property
    def head_options(self) -> Any:
        """The recipe's options of the head; where training starts from a head that exists, with the sizes of that one."""
        differences: list[str] = []
        head, named = load_warm(self.recipe, self.target, differences.append), self.recipe.train.warm_start
        if head is None:
            return self.recipe.head
        if differences:
            say(
                f"warning: {WARM_START}: the head in {named} was made for another target, or for this one before it was "
                f"changed: it is trained on for {self.target.path} as it is now; "
                "leave train.warm_start out to begin with a new one."
            )
        return adopt_options(self.recipe.head, head, self.target, str(named), self.recipe.train.resize)

    @cached_property
    def conversations(self) -> list[Conversation]:
        """The conversations to learn from."""
        spec = self.recipe.data
        what = "name JSONL or Parquet files, folders or Hub data sets to learn from"
        sources = self.sources("data.sources", spec.sources, what)
        return load_conversations(sources, split=spec.split, slice=spec.slice, limit=spec.limit, template=spec.template)

    @cached_property
    def conversations_digest(self) -> str:
        """Identifies what the conversations say, wherever they lie."""
        digest = hashlib.sha256()
        for conversation in self.conversations:
            said = asdict(conversation)
            del said["reference"]  # which nothing is learned from
            digest.update(repr(said).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def tokenizer_digest(self) -> str:
        """Identifies how text becomes token ids: vocabulary, merges and chat template."""
        parts = [getattr(self.tokenizer, "chat_template", None), self.tokenizer.special_tokens_map]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None and (
            backend.truncation or backend.padding
        ):  # which the first text that is tokenized ends
            backend = type(backend).from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
        parts.append(backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items()))
        return fingerprint(parts)

    def begin(self, stage: str, inputs: dict[str, Any], needed: Sequence[Path] | None = ()) -> bool:
        """Return True where the stage can be reused, with all that is needed of it, and say what; obey --redo the first time the
        stage begins. needed: None to make it again whatever is there."""
        run, redo = self.directory(stage), stage in self.redo
        done = run.begin(stage, inputs, redo=redo, needed=needed)
        self.redo.discard(stage)
        if done:
            say(f"{stage}: reusing {needed[0] if needed else run.path}", once=True)
        return done

    def directory(self, stage: str) -> RunDirectory:
        """Return the run directory that keeps a stage: answers and hidden states may be shared between runs."""
        return self.data if stage in DATA_STAGES else self.run

    def finish(self, stage: str, facts: dict[str, Any]) -> None:
        """Mark a stage as done, with the figures it reports."""
        if self.directory(stage) is not self.run and self.data.redone(stage):
            self.run.set_aside(stage)  # what follows from it
        self.directory(stage).finish(stage, facts)
        hush(f"{stage}: reusing {self.directory(stage).path}")  # where training is launched next, which would say so

    def put_back(self) -> None:
        """Put back what --redo set aside for a stage that has made nothing, if this process does make stages."""
        for directory in {self.run, self.data}:
            with suppress(OSError, UserError):  # else the next process does
                directory.put_back()

    def upstream(self, stage: str) -> str | None:
        """Return the fingerprint of an earlier stage, which later ones depend on."""
        record = self.directory(stage).record(stage)
        return record.fingerprint if record else None


def choose_device(named: str) -> str:
    """Return the device for `target.device`: auto takes a GPU if there is one. Raises UserError for one that is not here."""
    device = named
    if device != "auto" and device.split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"target.device is {device!r}: it is auto, cpu, cuda or cuda:N.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    here = world()
    if device == "cuda" and here.size > 1:
        device = f"cuda:{here.local_rank}"  # one GPU per process, also before Accelerate starts
        if here.local_rank >= torch.cuda.device_count() > 0:
            raise UserError(
                f"LOCAL_RANK is {here.local_rank}, but torch sees {torch.cuda.device_count()} GPU(s) here: start as many processes "
                "as there are GPUs."
            )
    elif device.startswith("cuda:") and here.size > 1 and device != f"cuda:{here.local_rank}":
        raise UserError(
            f"target.device is {device!r}, but {here.size} processes have a GPU each: set it to cuda, which gives each its own."
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"target.device is {device!r} but torch sees no GPU here: use cpu, or run `draftsmith doctor`.")
    if device.startswith("cuda:"):
        # Accelerate takes the current device, whatever the recipe says, and pinned memory belongs to it.
        torch.cuda.set_device(device)
    if device == "cpu":
        keep_freed_memory()
        # DeepSpeed, which Accelerate imports, warns where it finds no GPU by itself.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    return device


def team() -> Team:
    """Return the processes that share the work of this command."""
    return meeting() or Alone()


def makers(recipe: Recipe) -> Team:
    """Return who shares out what the target makes: processes, or groups of them that share the target."""
    size = recipe.target.tensor_parallel
    return team() if size == 1 else Groups(team(), size)
