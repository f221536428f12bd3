"""The stage that trains the head: its initial weights, the split of the samples, and the settings it depends on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.answers.generate import split_heldout
from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.load import find_chats
from draftsmith.data.features.store import FeatureSource, readable_bytes
from draftsmith.errors import UserError
from draftsmith.estimate.counting import HeadCost
from draftsmith.eval.training.history import read_history, read_stage, run_of, tell, untaught
from draftsmith.fields import fingerprint_fields
from draftsmith.foreign.text import read_object
from draftsmith.heads.adapter import DraftAdapter, adapt
from draftsmith.heads.base import DraftHead, draft_vocab_size_of
from draftsmith.heads.formats.recognise import head_digest
from draftsmith.heads.registry import find_method
from draftsmith.heads.vocab import (
    LOW_COVERAGE,
    Coverage,
    choose_draft_vocab,
    count_tokens,
    coverage_warnings,
    measure_coverage,
)
from draftsmith.heads.warm_start import RESIZED, restart
from draftsmith.machine import memory_of
from draftsmith.progress import say
from draftsmith.recipe.record import FOLLOWERS, flat_inputs
from draftsmith.stages.data import answer_inputs, feature_inputs, head_layers, stored_layers
from draftsmith.stages.drafters import load_warm, warm_folder
from draftsmith.stages.session import Session, team
from draftsmith.storage import fingerprint
from draftsmith.target.folder import fingerprint_directory
from draftsmith.target.gguf_file import model_folder
from draftsmith.target.shape import shape_of
from draftsmith.train import loop
from draftsmith.train.checkpoints import window_of
from draftsmith.train.meeting import STEP, meeting
from draftsmith.train.process import world
from draftsmith.train.schedule import TrainData


@dataclass(frozen=True)
class Start:
    """What a training starts from.

    train, heldout: indices of the samples to learn from and to evaluate on. coverage: how much of their tokens the draft vocabulary
    holds; None for a head that drafts the whole vocabulary. longest: tokens of the longest training sample.
    """

    head: DraftHead
    train: list[int]
    heldout: list[int]
    coverage: Coverage | None
    longest: int

    def facts(self) -> dict[str, Any]:
        """Return what run.json keeps of it."""
        covered = None if self.coverage is None else asdict(self.coverage)
        counts = {"answers": len(self.train), "heldout_answers": len(self.heldout), "longest": self.longest}
        return {**counts, "coverage": covered}


def prepare_training(session: Session, samples: Sequence[Tokenized]) -> Start:
    """Split the samples, choose the draft vocabulary and make the head. Raises UserError for what cannot be trained."""
    train, heldout = split_samples(session, samples)
    warm = load_warm(session.recipe, session.target)
    _warn_of_learned_heldout(session)
    learned = [samples[i] for i in train]
    vocab = pick_draft_vocab(session, warm, learned)
    covered = None
    if vocab is not None:
        size = session.target.vocab_size
        covered = measure_coverage(vocab, learned, [samples[i] for i in heldout], size)
        _say_coverage(covered, len(vocab), size, chosen=_chooses_vocab(session, warm))
    torch.manual_seed(session.recipe.seed)
    longest = max(len(sample.ids) for sample in learned)
    head = initial_head(session, warm, vocab, samples)
    if warm is not None and session.recipe.train.resize:
        ours, theirs = (one.describe().get("options", {}) for one in (head, warm))
        changed = [
            f"head.{key} {theirs.get(key)} -> {ours[key]}"
            for key in RESIZED
            if key in ours and ours[key] != theirs.get(key)
        ]
        names, known = head.state_dict().keys(), warm.state_dict().keys()
        say(
            f"training: starts from {session.recipe.train.warm_start}, {', '.join(changed) or 'of the same sizes'}; "
            f"{len(names - known)} tensors are new, {len(known - names)} left out"
        )
    return Start(head, train, heldout, covered, longest)


def _warn_of_learned_heldout(session: Session) -> None:
    """Warn where the head that training starts from has learned some of the answers that are held out now."""
    warm, answers = warm_folder(session.recipe), session.upstream("answers")
    run = None if warm is None else run_of(warm)
    if run is None or answers is None:
        return
    before, heldout = read_stage(run / "run.json", "train")[0], session.recipe.data.heldout
    if before.get("answers") == answers and (kept := before.get("data.heldout", heldout)) < heldout:
        session.warn(
            f"data.heldout is {heldout}, but the head of train.warm_start kept out {kept} of the same answers and learned the others: held-out tau "
            f"is too high from the first step on, and that head may stay the best one; set data.heldout to {kept}."
        )


def _chooses_vocab(session: Session, warm: DraftHead | None) -> bool:
    """Return whether the draft vocabulary is chosen from the answers, not that of the head that training starts from."""
    return warm is None or (session.recipe.train.resize and draft_vocab_size_of(session.recipe.head) is not None)


def train_stage(session: Session, start: Start, features: FeatureSource) -> Path:
    """Train the head of `prepare_training`; return the folder of the best one."""
    folder, inputs = session.recipe.run_dir / "train", train_inputs(session)
    if met := meeting():
        met.folder = folder
        met.compare(flat_inputs(inputs), "start all processes with the same recipe, models and options")
        from accelerate import PartialState  # here, as it is slow to import and one process needs none

        PartialState(cpu=session.device == "cpu", timeout=STEP)
    if not team().tell(lambda: session.begin("train", _with_equal_batch(session, inputs, folder))):
        loop.train(
            session.recipe,
            session.target,
            start.head,
            TrainData(features, start.train, start.heldout, flat_inputs(inputs)),
            folder,
        )
        if world().main:
            session.finish("train", read_object(folder / "summary.json", "add --redo train") | start.facts())
            past = read_history(session.recipe.run_dir)
            for line in () if past is None else tell(past):
                say(line if line.startswith("warning: ") else f"training: {line}")
    return folder / "best"


def learned(session: Session) -> Path | None:
    """Return the folder of the best head if it is still this recipe's although another run has changed the data that both share.

    The head's own record says what it learned from. None if the data are unchanged, or are to be made again.
    """
    record, recipe = session.run.record("train"), session.recipe
    if record is None or record.state != "done" or session.redo & set(FOLLOWERS["answers"][:3]) or world().size > 1:
        return None
    answers = fingerprint(flat_inputs(answer_inputs(session)))
    for layers in (stored_layers(session), head_layers(session)):
        features = fingerprint(flat_inputs(feature_inputs(session, answers, layers)))
        upstream = {
            "answers": answers if recipe.answers.regenerate else session.upstream("answers"),
            "features": features,
        }
        inputs = _with_equal_batch(session, train_inputs(session, upstream), recipe.run_dir / "train")
        others = [stage for stage in upstream if session.upstream(stage) not in (None, upstream[stage])]
        if others and session.run.holds("train", inputs):
            say(f"train: reusing {session.run.path}, whose {' and '.join(others)} another run has changed since")
            return recipe.run_dir / "train" / "best"
    return None


def warn_of_untaught(session: Session) -> None:
    """Warn, before hours of decoding, of a head that has learned nothing according to its run's metrics, or was not to the end of its
    training."""
    try:
        past = read_history(session.named_head or session.recipe.run_dir)
    except UserError as error:  # a damaged log is no reason to measure nothing
        say(f"warning: {error}")
        return
    if past is None:
        return
    if not past.finished:
        session.warn(
            f"the training of this head was not finished: its last evaluation is of step {past.points[-1].step}, before learning rates fell to their end, and "
            "the best head so far is taken; go on with `draftsmith train`, then evaluate and export again."
        )
    if past.learned_nothing:
        session.warn(untaught(past))


def _with_equal_batch(session: Session, inputs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return `inputs` with the recorded accumulation if both give the same number of micro-batches per step over all processes,
    since the training is then the same."""
    known, window = session.run.record("train"), session.processes * session.recipe.train.accumulation
    before = None if known is None else known.inputs.get("train.accumulation")
    if before is None or window_of(folder) != window:
        return inputs
    return inputs | {"train": inputs["train"] | {"accumulation": before}}


def train_inputs(session: Session, made: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """Return what a trained head depends on, as run.json records it.

    made: fingerprints of the stages it learns from; None takes those of the files that are there.
    """
    recipe, warm = session.recipe, warm_folder(session.recipe)
    head = fingerprint_fields(recipe.head)
    for key in getattr(recipe.head, "MODELS", ()):
        if head.get(key) and Path(head[key]).exists():
            head[key] = fingerprint_directory(model_folder(head[key]))
    volatile = ("checkpoint_minutes", "workers", "warm_start")
    upstream = ("answers", "features") if recipe.features.source == "store" else ("answers",)
    return {
        **{stage: session.upstream(stage) if made is None else made[stage] for stage in upstream},
        **({} if recipe.answers.regenerate else answer_inputs(session)),
        "layer_ids": head_layers(session),
        "features.source": recipe.features.source,
        "features.dtype": recipe.features.dtype,
        "method": recipe.method,
        "head": head,
        "train": fingerprint_fields(recipe.train, volatile),
        # What a head holds counts, not where it lies; so with models above.
        **({} if warm is None else {"train.warm_start": head_digest(warm)}),
        "data.heldout": recipe.data.heldout,
        "data.on_too_long": recipe.data.on_too_long,
        "num_speculative_tokens": recipe.evaluate.num_speculative_tokens,
        "seed": recipe.seed,
    }


def split_samples(session: Session, samples: Sequence[Tokenized]) -> tuple[list[int], list[int]]:
    """Leave out samples that do not fit a row; return the indices of the training samples and of the held-out ones."""
    recipe = session.recipe
    fits = [i for i, sample in enumerate(samples) if len(sample.ids) <= recipe.train.row_tokens]
    if len(fits) < len(samples):
        say(
            f"warning: {len(samples) - len(fits)} samples are longer than train.row_tokens={recipe.train.row_tokens} and "
            "are left out of training: raise it, or lower data.max_length."
        )
    if len(samples) > recipe.data.heldout >= len(fits):
        raise UserError(
            f"Only {len(fits)} of {len(samples)} samples fit train.row_tokens={recipe.train.row_tokens}, and data.heldout takes "
            f"{recipe.data.heldout}: raise train.row_tokens, or lower data.max_length."
        )
    chats = find_chats(session.conversations, answered=not recipe.answers.regenerate)
    names = [samples[i].conversation or samples[i].sample_id for i in fits]
    names = [chats.get(name, name) for name in names]  # else a held-out answer stands in what is learned from
    if not recipe.answers.regenerate and (again := len(chats) - len({*chats.values()})):
        say(
            f"warning: {again} of {len(chats)} rows begin as another one up to its first answer, as requests of one chat do: answers that they share "
            "are learned as often; keep the longest of each chat in data.sources."
        )
    train, heldout = split_heldout(names, recipe.data.heldout)
    return [fits[i] for i in train], [fits[i] for i in heldout]


def pick_draft_vocab(session: Session, warm: DraftHead | None, samples: Iterable[Tokenized] = ()) -> Tensor | None:
    """Return the draft vocabulary [W]: that of `warm`, or one chosen from the answers to learn from, with the tokens that end a text or
    have a meaning of their own; None for the whole vocabulary. Raises UserError for a size that is larger than the target's."""
    size, vocab_size = draft_vocab_size_of(session.head_options), session.target.vocab_size
    kept = None if _chooses_vocab(session, warm) else warm
    if size is None or size == vocab_size or (kept is not None and size > vocab_size):
        return None
    if kept is not None and kept.draft_vocab is not None:
        return kept.draft_vocab.cpu()
    always = {*session.target.eos_ids, *session.tokenizer.all_special_ids}
    return choose_draft_vocab(count_tokens(samples, vocab_size), size, (i for i in always if i < vocab_size))


def _say_coverage(covered: Coverage, size: int, vocab_size: int, *, chosen: bool) -> None:
    """Say how many tokens the draft vocabulary covers, and warn if too few. chosen: it was chosen for this training."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in covered.heldout_by_slice.items())
    say(
        f"draft vocab: {size} of {vocab_size} tokens cover {covered.heldout:.2%} of the held-out answers ({shares}), and "
        f"{covered.training:.2%} of those to learn from"
    )
    fix = "raise head.draft_vocab_size"
    if not chosen:
        fix = "train a new head, or choose it anew with train.resize and head.draft_vocab_size, as that of train.warm_start stays so"
    elif covered.training >= LOW_COVERAGE:
        fix += ", or let it be chosen from more answers"
    for warning in coverage_warnings(covered, size, fix):
        say(f"warning: {warning}")


def initial_head(
    session: Session, warm: DraftHead | None, draft_vocab: Tensor | None, samples: Iterable[Tokenized] = ()
) -> DraftHead:
    """Return the head to train: `warm` of `load_warm`, or a new one with this draft vocabulary [W].

    samples: the texts to learn from; a warning says where they hold the token that the recipe takes for a mask.
    """
    mask = getattr(session.head_options, "mask_token_id", None)
    with_mask = None if mask is None else next((sample for sample in samples if bool((sample.ids == mask).any())), None)
    if with_mask is not None:
        say(
            f"warning: head.mask_token_id is {mask}, which texts have ({with_mask.sample_id} for one): the head takes it there for a "
            "token that is still to be drafted; name one that no text has."
        )
    method = session.recipe.method
    if warm is not None:  # its weights, in other sizes where the recipe says so, or an adapter on them
        spec, base = session.recipe.train, warm_folder(session.recipe)
        head = restart(warm, session.head_options, session.target, method, resize=spec.resize, draft_vocab=draft_vocab)
        if spec.lora_rank is None or base is None:
            return head
        if warm.method != method:
            raise UserError(
                f"train.lora_rank is {spec.lora_rank}, but {base} holds a head of {warm.method}, which lacks a part of a {method} head: "
                f"train one first, or set method to {warm.method}."
            )
        alpha = spec.lora_alpha or 2.0 * spec.lora_rank
        return adapt(head, DraftAdapter(spec.lora_rank, alpha, base.resolve(), head_digest(base)))
    _check_size(session)
    head = find_method(method).build(session.recipe.head, session.target, draft_vocab)
    if head.method != method:
        raise UserError(
            f"method is {method!r}, but the package that adds it makes heads of the method {head.method!r}: the entry point in its "
            "pyproject.toml and `method` of its heads must be one name."
        )
    return head


def _check_size(session: Session) -> None:
    """Raise UserError if a new head's weights alone take more memory than there is. A head that cannot be built without values is not
    counted."""
    recipe, target = session.recipe, session.target
    try:
        cost = HeadCost(recipe.method, recipe.head, shape_of(target.model.config, target.dtype.itemsize), target.path)
    except UserError:
        return  # building it, which comes next, says what is wrong, unless only the shapes were too little for it
    needed, there = 0 if cost.guessed else 4 * cost.parameters, memory_of(session.device)
    if needed > there:
        device = "this machine" if session.device == "cpu" else f"the GPU {session.device}"
        raise UserError(
            f"The {recipe.method} head of this recipe has {needed // 4:,} weights, {readable_bytes(needed)} in float32, but "
            f"{device} has {readable_bytes(there)} of memory: lower the sizes under head."
        )
