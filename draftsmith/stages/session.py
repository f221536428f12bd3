"""A recipe at work: its run directory, and what several stages load only once."""

import gc
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch

from draftsmith.data.conversations.load import Conversation, load_conversations
from draftsmith.data.conversations.templates import check_template_keys, check_tokenizer, load_tokenizer
from draftsmith.data.embedded.default import EmbeddedDefault, ensure_embedded
from draftsmith.errors import UserError
from draftsmith.eval.decode.selfcheck import check_decoding
from draftsmith.files import fingerprint
from draftsmith.heads.target.identity import TargetIdentity
from draftsmith.heads.target.target import Target, load_target
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.allocator import keep_freed_memory
from draftsmith.stages.run import DATA_STAGES, RunDirectory


def say(text: str) -> None:
    """Print a line about what is going on, apart from the results on standard output."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def main_process_first(device: str) -> Iterator[bool]:
    """Let one process make the files that all of them then reuse; yield whether this is that process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    from accelerate import PartialState

    # The others wait for as long as answers and hidden states take, which may be days.
    state = PartialState(cpu=device == "cpu", timeout=timedelta(days=7))
    with state.main_process_first():
        yield state.is_main_process


class Session:
    """A recipe, its run directory, and what several stages load only once."""

    def __init__(self, recipe: Recipe, *, redo: set[str] | None = None) -> None:
        self.recipe = recipe
        main = int(os.environ.get("RANK", "0")) == 0
        # Stages to remove when they begin; each once, and by one process only.
        self.redo = set(redo or ()) if main else set()
        self.run = RunDirectory(recipe.run_dir)
        shared = recipe.data_path != recipe.run_dir
        self.data = RunDirectory(recipe.data_path, DATA_STAGES) if shared else self.run
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Say what makes results doubtful, once, and keep it for the results."""
        if text not in self.warnings:
            self.warnings.append(text)
            say(f"warning: {text}")

    @cached_property
    def device(self) -> str:
        """The device that the recipe names; auto takes a GPU if there is one."""
        device = self.recipe.target.device
        if device != "auto" and device.split(":")[0] not in ("cpu", "cuda"):
            raise UserError(f"target.device is {device!r}: it is auto, cpu, cuda or cuda:N.")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and "LOCAL_RANK" in os.environ:
            device = f"cuda:{os.environ['LOCAL_RANK']}"  # one GPU per process, also before Accelerate starts
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(
                f"target.device is {device!r} but torch sees no GPU here: use cpu, or run `draftsmith doctor`."
            )
        if device.startswith("cuda:") and "LOCAL_RANK" not in os.environ:
            # Accelerate takes the current device, whatever the recipe says.
            torch.cuda.set_device(device)
        if device == "cpu":
            keep_freed_memory()
        return device

    @cached_property
    def embedded(self) -> EmbeddedDefault:
        """The embedded default, trained on first use."""
        return ensure_embedded(device=self.device)

    @property
    def target_path(self) -> str:
        """Folder or Hub name of the target."""
        path = self.recipe.target.path
        return str(self.embedded.target) if path == "embedded" else path

    def target_in(self, dtype: str) -> Target:
        """Return the session's own target where that is in `dtype` (or it is "auto"), else load one."""
        return self.target if dtype in ("auto", self.target.dtype_name) else self.load_target(dtype)

    def load_target(self, dtype: str, path: str | None = None) -> Target:
        """Load the target in `dtype`, or as it would be the one in `path`, and check that the decoder serves it exactly."""
        spec = self.recipe.target
        target = load_target(
            path or self.target_path,
            dtype=dtype,
            device=self.device,
            attn_implementation=spec.attn_implementation,
            trust_remote_code=spec.trust_remote_code,
        )
        check_decoding(target)
        return target

    @cached_property
    def target(self) -> Target:
        """The target in the dtype for answers and hidden states."""
        return self.load_target(self.recipe.target.dtype)

    def drop_target(self) -> None:
        """Give the target's memory back, for processes that load one of their own; who asks again loads it again."""
        self.__dict__.pop("target", None)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @cached_property
    def original(self) -> TargetIdentity | None:
        """The original that a target which was tuned with its heads is compared with; None for any other target."""
        from draftsmith.stages.untuned_target import find_original

        return find_original(self)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, checked against its vocabulary."""
        tokenizer = load_tokenizer(self.target_path, self.recipe.target.trust_remote_code)
        check_tokenizer(tokenizer, self.target.vocab_size)
        check_template_keys(tokenizer, self.recipe.data.template)
        return tokenizer

    def sources(self, key: str, named: Sequence[str], what: str) -> list[str]:
        """Return the files that a recipe names under `key`; where it names none, those of the embedded default."""
        if named:
            return list(named)
        if self.recipe.target.path != "embedded":
            raise UserError(f"{key} is empty: {what}.")
        return [str(self.embedded.conversations if key == "data.sources" else self.embedded.prompts)]

    @cached_property
    def head_options(self) -> Any:
        """The recipe's options of the head; where training starts from a head that exists, with the sizes of that."""
        from draftsmith.stages.initialisation import head_options

        return head_options(self)

    @cached_property
    def conversations(self) -> list[Conversation]:
        """The conversations to learn from."""
        spec = self.recipe.data
        what = "name JSONL or Parquet files, folders or Hub data sets to learn from"
        sources = self.sources("data.sources", spec.sources, what)
        return load_conversations(sources, split=spec.split, slice=spec.slice, limit=spec.limit)

    @cached_property
    def conversations_digest(self) -> str:
        """Identifies what the conversations say, wherever they lie."""
        digest = hashlib.sha256()
        for conversation in self.conversations:
            digest.update(repr(asdict(conversation)).encode())
        return digest.hexdigest()[:16]

    @cached_property
    def tokenizer_digest(self) -> str:
        """Identifies how text becomes token ids: vocabulary, merges and chat template."""
        parts = [getattr(self.tokenizer, "chat_template", None), self.tokenizer.special_tokens_map]
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        parts.append(backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items()))
        return fingerprint(parts)

    def begin(self, stage: str, inputs: dict[str, Any]) -> bool:
        """Return True where the stage can be reused; obey --redo the first time the stage begins."""
        run, redo = self.directory(stage), stage in self.redo
        done = run.begin(stage, inputs, redo=redo)
        if redo and run is not self.run:
            self.run.remove(stage)  # what follows from it
        self.redo.discard(stage)
        if done:
            say(f"{stage}: reusing {run.path}")
        return done

    def directory(self, stage: str) -> RunDirectory:
        """Return the run directory that keeps a stage: answers and hidden states may be shared between runs."""
        return self.data if stage in DATA_STAGES else self.run

    def finish(self, stage: str, facts: dict[str, Any]) -> None:
        """Mark a stage as done, with the figures it reports."""
        self.directory(stage).finish(stage, facts)

    def upstream(self, stage: str) -> str | None:
        """Return the fingerprint of an earlier stage, which later ones depend on."""
        record = self.directory(stage).record(stage)
        return record.fingerprint if record else None
