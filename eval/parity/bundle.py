"""The parity bundle of an export: a few prompts, what must come out at temperature 0, and what each fault would give instead.

It is made by our decoder from the export as it was loaded again, and checked: the decoder's rounds must be those that the head drafts along
the target's text when that was read in one pass (replay.py).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import draftsmith
from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError
from draftsmith.eval.engines.agreement import CLOSE, EngineAnswer, EngineRound, trace_ours
from draftsmith.eval.parity.faults import FAULTS, spoiled
from draftsmith.eval.parity.replay import Engine, Replayed, Text, read_text, replay
from draftsmith.fields import LATER
from draftsmith.foreign.records import read_current
from draftsmith.foreign.text import read_object
from draftsmith.heads.base import DraftHead
from draftsmith.heads.export.export import PARITY
from draftsmith.heads.formats.schema import target_reference
from draftsmith.heads.registry import find_method
from draftsmith.storage import fingerprint, sha256_file, write_text
from draftsmith.target.target import Target

FILE = "bundle.json"
SCHEMA_VERSION = 1
TOKENS, PER_SLICE, MOST_PROMPTS, _TOP = 32, 2, 10, 5
"""Tokens of an answer, prompts of a slice, prompts in all, and likeliest tokens that are kept of a place."""
_MOST_BYTES = 4 << 20

Top = tuple[tuple[int, float], ...]
"""Likeliest tokens and their logits."""


@dataclass(frozen=True)
class ParityPrompt:
    """A prompt and what comes out.

    messages: that the prompt is of, None where it is of token ids alone. text_ids: the answer, and behind it what the target would say
    further. answer_tokens: how many of these are the answer. ends: whether it ends by an end token. margins: by which each token of the
    text is ahead of the next likely one, in logits. target_top: of the answer's first places. draft_top: of the first round's tokens.
    draft_margins: of every drafted token of every round. rounds: (accepted, drafted tokens ...) each.
    """

    id: str
    slice: str
    messages: tuple[dict[str, Any], ...] | None
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    text_ids: tuple[int, ...]
    answer_tokens: int
    ends: bool
    margins: tuple[float, ...]
    target_top: tuple[Top, ...]
    draft_top: tuple[Top, ...]
    draft_margins: tuple[tuple[float, ...], ...]
    rounds: tuple[tuple[int, ...], ...]

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """The answer."""
        return self.text_ids[: self.answer_tokens]

    @property
    def request(self) -> Request:
        """How it is asked."""
        return Request(self.id, self.slice, self.prompt_ids, self.max_new_tokens)

    def answer(self, rounds: Sequence[Sequence[int]] | None = None) -> EngineAnswer:
        """Return the answer with its rounds, or with those of a fault; the last may go past its end."""
        found = tuple(EngineRound(tuple(drafted), accepted) for accepted, *drafted in rounds or self.rounds)
        return EngineAnswer(self.id, self.answer_ids, found)


@dataclass(frozen=True)
class Bundle:
    """What an engine must give.

    target: its name. dtype: of the target. budget: logits this close may change places by rounding. files: hashes of the export's files.
    faults: by name, the rounds of every prompt. unseen: faults that this head can have, which change nothing on these prompts. template:
    arguments of the chat template that the prompts were made with. served_as: what requests call the target, where that is not its name.
    """

    draftsmith: str
    method: str
    layout: str
    num_speculative_tokens: int
    target: str
    fingerprint: str
    dtype: str
    eos_ids: tuple[int, ...]
    budget: float
    files: dict[str, str]
    prompts: tuple[ParityPrompt, ...]
    faults: dict[str, tuple[tuple[tuple[int, ...], ...], ...]]
    unseen: tuple[str, ...]
    template: dict[str, Any] = field(default_factory=dict, metadata=LATER)
    served_as: str = field(default="", metadata=LATER)
    schema_version: int = SCHEMA_VERSION


def choose(requests: Sequence[Request], target: Target, tokens: int) -> list[Request]:
    """Return the shortest prompts of each slice, with answers that leave room for drafts of so many tokens in the target's context."""
    found: list[Request] = []
    taken: Counter[str] = Counter()
    per_slice = max(1, min(PER_SLICE, MOST_PROMPTS // max(1, len({r.slice for r in requests}))))
    for request in sorted(requests, key=lambda r: len(r.prompt_ids)):
        room = target.context_length - len(request.prompt_ids) - 2 * tokens - 2
        length = min(TOKENS, request.max_new_tokens, room)
        if length > tokens and taken[request.slice] < per_slice and len(found) < MOST_PROMPTS:
            taken[request.slice] += 1
            found.append(replace(request, max_new_tokens=length))
    return found


def make_bundle(
    target: Target,
    head: DraftHead,
    requests: Sequence[Request],
    tokens: int,
    messages: Mapping[str, Sequence[Mapping[str, Any]]],
    layout: str,
) -> Bundle | None:
    """Return the bundle of a head that drafts so many tokens, None where no prompt leaves room for it.

    messages: by id of a request, those that it is of.
    """
    # Past its end, so that it is known what an engine accepts of a draft that goes on there.
    head, chosen = head.in_engines(), choose(requests, target, tokens)
    longer = [replace(r, max_new_tokens=r.max_new_tokens + tokens + 1, ignore_eos=True) for r in chosen]
    if not longer:
        return None
    traced = trace_ours(target, find_method(head.method).make_drafter(head, tokens), longer, Sampling(0.0))
    prompts, texts, close = [], [], CLOSE
    ends = [
        next((n for n, token in enumerate(answer.output_ids[: r.max_new_tokens], 1) if token in target.eos_ids), 0)
        for r, answer in zip(chosen, traced, strict=True)
    ]
    every = [
        read_text(target, r.prompt_ids, answer.output_ids, end or r.max_new_tokens)
        for r, answer, end in zip(chosen, traced, ends, strict=True)
    ]
    played = replay(Engine.of(head, tokens), every, watched=True)
    for request, answer, end, text, own in zip(chosen, traced, ends, every, played, strict=True):
        if own.rounds != answer.rounds[: len(own.rounds)]:
            continue  # rounding decides its drafts: it would tell nothing of an engine
        logits_TV = target.head.logits(text.last[text.prompt - 1 : -1])
        again = target.forward(text.ids[None, : text.prompt + text.end // 2].expand(2, -1)).last[0, text.prompt - 1 :]
        close = max(close, 4 * float((target.head.logits(again) - logits_TV[: len(again)]).abs().max()))
        texts.append(text)
        said, first = messages.get(request.sample_id), own.logits[0] if own.logits else None
        prompts.append(
            ParityPrompt(
                request.sample_id,
                request.slice,
                None if said is None else tuple(map(dict, said)),
                request.prompt_ids,
                request.max_new_tokens,
                tuple(answer.output_ids),
                text.end,
                bool(end),
                _margins(logits_TV),
                _top(logits_TV[: text.end]),
                () if first is None else _top(first, head),
                tuple(() if logits is None else _margins(logits) for logits in own.logits),
                _rounds(own),
            )
        )
    if not prompts:
        return None
    faults, unseen = _foretell(target, head, tokens, prompts, texts)
    return Bundle(
        draftsmith.__version__, head.method, layout, tokens, target_reference(target), target.fingerprint,
        target.dtype_name, target.eos_ids, close, {}, tuple(prompts), faults, unseen,
    )  # fmt: skip


def _foretell(
    target: Target, head: DraftHead, tokens: int, prompts: Sequence[ParityPrompt], texts: Sequence[Text]
) -> tuple[dict[str, tuple[tuple[tuple[int, ...], ...], ...]], tuple[str, ...]]:
    """Return what each fault would give, and those that would change nothing."""
    faults, unseen = {}, []
    for fault in FAULTS:
        if (engine := spoiled(fault, head, tokens, target)) is None:
            continue
        try:
            rounds = tuple(_rounds(own) for own in replay(engine, texts))
        except UserError:  # a text with what is kept wrongly is longer than a draft model's context
            continue
        if rounds == tuple(prompt.rounds for prompt in prompts):
            unseen.append(fault.name)
        else:
            faults[fault.name] = rounds
    return faults, tuple(unseen)


def _rounds(played: Replayed) -> tuple[tuple[int, ...], ...]:
    return tuple((r.accepted, *r.drafted) for r in played.rounds)


def _margins(logits: Tensor) -> tuple[float, ...]:
    best = logits.topk(2, -1).values
    return tuple(round(x, 5) for x in (best[:, 0] - best[:, 1]).tolist())


def _top(logits: Tensor, head: DraftHead | None = None) -> tuple[Top, ...]:
    best = logits.topk(min(_TOP, logits.shape[-1]), -1)
    narrow = head is not None and head.draft_vocab is not None and logits.shape[-1] == len(head.draft_vocab)
    ids = head.target_ids(best.indices) if head is not None and narrow else best.indices
    pairs = zip(ids.tolist(), best.values.tolist(), strict=True)
    return tuple(tuple((i, round(x, 4)) for i, x in zip(*row, strict=True)) for row in pairs)


def write_bundle(export: Path, bundle: Bundle) -> None:
    """Write the bundle into the folder of an export, bound to its files by their hashes."""
    names = sorted(p.name for p in export.iterdir() if p.name == "config.json" or p.suffix in (".safetensors", ".pt"))
    value = asdict(replace(bundle, files={name: sha256_file(export / name) for name in names}))
    (export / PARITY).mkdir(exist_ok=True)
    write_text(export / PARITY / FILE, json.dumps(value | {"digest": fingerprint(value)}, separators=(",", ":")) + "\n")


def read_bundle(export: Path) -> Bundle:
    """Return the bundle of an export. Raises UserError where there is none, or one that is not as it was written or of other files."""
    file, remedy = export / PARITY / FILE, "export the head again with draftsmith export"
    if not export.is_dir():
        raise UserError(
            f"{export} is no folder: name that of an export, as {export.name or 'export'} under a run's export/."
        )
    if not file.is_file():
        raise UserError(
            f"{export} has no {PARITY}/{FILE}: earlier versions exported without one; make it with draftsmith export --recipe R --redo export."
        )
    value = read_object(file, remedy, most=_MOST_BYTES)
    if value.pop("digest", None) != fingerprint(value):
        raise UserError(f"{file} is not as it was written (its digest differs): restore it, or {remedy}.")
    bundle = read_current(Bundle, value, str(file), remedy)
    for name, known in bundle.files.items():
        if not (export / name).is_file() or sha256_file(export / name) != known:
            raise UserError(
                f"{export / name} is not the file that {file} was made with, so that an engine would give something else: restore it, or "
                f"{remedy}."
            )
    return bundle
