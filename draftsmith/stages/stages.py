"""The stages of a recipe: answers -> features -> train -> evaluate -> export. One function each.

Every stage first asks the run directory whether it is already there; it is then reused and said so.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.answers.generate import prepare_prompts, read_answers, regenerate
from draftsmith.data.answers.split import split_heldout
from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.masks import TokenizedSet, tokenize_all
from draftsmith.data.features.extract import OnlineSource, extract
from draftsmith.data.features.store import FeatureSource, FeatureStore
from draftsmith.errors import UserError
from draftsmith.fields import fingerprint_fields
from draftsmith.files import fingerprint, sha256_file
from draftsmith.heads.base import draft_vocab_size_of, layer_ids_of
from draftsmith.heads.files import CONFIG, all_weights_files, weights_file
from draftsmith.heads.formats.recognise import CHECKPOINT, load_head, recognise, refuse_other_files
from draftsmith.heads.target.fingerprint import fingerprint_directory
from draftsmith.heads.target.target import Target
from draftsmith.heads.vocab import choose_draft_vocab, count_by_slice, coverage, coverage_warnings
from draftsmith.stages.session import Session, main_process_first, say
from draftsmith.train.schedule import TrainData


def data_inputs(session: Session) -> dict[str, Any]:
    """What the answers depend on."""
    recipe = session.recipe
    # Sources count by what they say, not by where they lie; the rest matters to later stages only.
    elsewhere = ("sources", "split", "slice", "limit", "heldout", "on_too_long")
    return {
        "conversations": session.conversations_digest,  # first: a wrong path is told before the target is loaded
        "target": session.target.fingerprint,
        "target.dtype": session.target.dtype_name,
        "eos": list(session.target.eos_ids),
        "tokenizer": session.tokenizer_digest,
        "data": fingerprint_fields(recipe.data, elsewhere),
        "answers": fingerprint_fields(recipe.answers),
        "seed": recipe.seed,
    }


def answers_stage(session: Session) -> Path | None:
    """Let the target answer the prompts; None where the recipe takes the answers in the data."""
    recipe, spec = session.recipe, session.recipe.answers
    if not spec.regenerate:
        return None
    path = recipe.data_path / "answers.jsonl"
    if session.begin("answers", data_inputs(session)):
        return path
    prompts = prepare_prompts(
        session.tokenizer,
        session.conversations,
        max_new_tokens=lambda slice_name: spec.max_new_tokens,
        max_length=min(recipe.data.max_length, session.target.context_length),
        seed=recipe.seed,
        template=recipe.data.template,
    )
    say(f"answers: {len(prompts)} of {len(session.conversations)} prompts, at temperature {spec.temperature}")
    started = time.perf_counter()
    regenerate(session.target, session.tokenizer, prompts, path, sampling=spec.sampling, batch=spec.batch)
    seconds = time.perf_counter() - started
    facts = answer_facts(path) | {"seconds": seconds}
    session.finish("answers", facts)
    say(f"answers: {facts['answers']} answers, {facts['output_tokens']} tokens in {seconds:.0f} s, {path}")
    return path


def answer_facts(path: Path) -> dict[str, Any]:
    """Count answers, tokens and distinct answers per slice."""
    samples = read_answers(path).samples
    slices: dict[str, list[tuple[int, ...]]] = {}
    for sample in samples:
        slices.setdefault(sample.slice, []).append(tuple(sample.ids[sample.mask].tolist()))
    return {
        "answers": len(samples),
        "output_tokens": sum(int(s.mask.sum()) for s in samples),
        "distinct_share": {name: len(set(texts)) / len(texts) for name, texts in sorted(slices.items())},
    }


def load_samples(session: Session) -> TokenizedSet:
    """Return the token ids and masks that the head learns from, and say what was left out."""
    recipe = session.recipe
    limit = min(recipe.data.max_length, session.target.context_length)
    path = answers_stage(session)
    if path is not None:
        samples = read_answers(path, max_length=limit, on_too_long=recipe.data.on_too_long)
    else:
        samples = tokenize_all(
            session.tokenizer,
            session.conversations,
            max_length=limit,
            on_too_long=recipe.data.on_too_long,
            template_kwargs=recipe.data.template,
        )
    say(f"data: {samples.stats}")
    return samples


def samples_at_hand(session: Session, count: int) -> list[Tokenized]:
    """Return a few samples to look at, without making anything: the recipe's own finished answers, else the data as
    it is. Says what was left out."""
    recipe = session.recipe
    if recipe.answers.regenerate and session.directory("answers").holds("answers", data_inputs(session)):
        limit = min(recipe.data.max_length, session.target.context_length)
        path = recipe.data_path / "answers.jsonl"
        found = read_answers(path, max_length=limit, on_too_long=recipe.data.on_too_long)
    else:
        found = tokenize_all(
            session.tokenizer,
            session.conversations[:count],
            max_length=recipe.data.max_length,
            on_too_long=recipe.data.on_too_long,
            template_kwargs=recipe.data.template,
        )
    say(f"data: {found.stats}")
    return found.samples[:count]


def layer_ids(session: Session) -> tuple[int, ...]:
    """The layers that the head reads."""
    return layer_ids_of(session.head_options, session.target)


def stored_layers(session: Session) -> tuple[int, ...]:
    """The layers to store: those that the recipe names, else those of a finished store that has what the head reads
    (another recipe's, in a shared data_dir), else those that the head reads."""
    if session.recipe.features.layer_ids is not None:
        return tuple(session.recipe.features.layer_ids)
    needed, known = layer_ids(session), session.directory("features").record("features")
    if known and known.state == "done" and "features" not in session.redo:
        present = tuple(known.inputs.get("layer_ids", ()))
        return present if set(needed) <= set(present) else needed
    return needed


def features_stage(session: Session, samples: list[Tokenized]) -> FeatureSource:
    """Return the hidden states of the samples: from a store that is made once, or computed on demand."""
    recipe, spec = session.recipe, session.recipe.features
    stored = stored_layers(session)
    if spec.source == "online":
        return OnlineSource(session.target, samples, stored, dtype=spec.dtype, batch_tokens=spec.batch_tokens)
    path = recipe.data_path / "features"
    inputs = data_inputs(session) if not recipe.answers.regenerate else {"answers": session.upstream("answers")}
    inputs = inputs | {
        "layer_ids": stored,
        "features.dtype": spec.dtype,
        "features.batch_tokens": spec.batch_tokens,
        "features.shard_mb": spec.shard_mb,
        "data.on_too_long": recipe.data.on_too_long,
    }
    if not session.begin("features", inputs):
        started = time.perf_counter()
        extract(
            session.target,
            samples,
            path,
            layer_ids=stored,
            dtype=spec.dtype,
            batch_tokens=spec.batch_tokens,
            shard_bytes=spec.shard_mb * 2**20,
        )
        seconds = time.perf_counter() - started
        tokens = sum(len(s.ids) for s in samples)
        size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        session.finish("features", {"tokens": tokens, "seconds": seconds, "bytes": size})
        say(f"features: {tokens} tokens in {seconds:.0f} s, {path}")
    return FeatureStore(path, fingerprint=session.target.fingerprint, verify=spec.verify)


def always_drafted(session: Session) -> list[int]:
    """Return the tokens that every draft vocabulary holds: those that end a text or have a meaning of their own."""
    known = {*session.target.eos_ids, *session.tokenizer.all_special_ids}
    return sorted(i for i in known if i < session.target.vocab_size)


def draft_vocab(
    session: Session, samples: list[Tokenized], train: list[int], given: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Choose the draft vocabulary from the training answers, unless one is `given`; warn where it covers too little."""
    size = draft_vocab_size_of(session.head_options)
    vocab_size = session.target.vocab_size
    if size is None or size >= vocab_size:
        return None
    always = always_drafted(session)
    by_slice = count_by_slice([samples[i] for i in train], vocab_size)
    counts = torch.stack(list(by_slice.values())).sum(0)
    vocab = choose_draft_vocab(counts, size, always) if given is None else given.cpu()
    shares = ", ".join(f"{name} {coverage(part, vocab):.1%}" for name, part in by_slice.items())
    say(
        f"draft vocab: {size} of {vocab_size} tokens cover {coverage(counts, vocab):.2%} of the tokens to learn ({shares})"
    )
    fix = "raise head.draft_vocab_size" if given is None else "train a new head, as that of train.warm_start stays so"
    for warning in coverage_warnings(by_slice, vocab, fix):
        say(f"warning: {warning}")
    return vocab


def train_stage(session: Session) -> Path:
    """Train the head on what the earlier stages made; return the folder of the best one."""
    from draftsmith.stages.initialisation import load_warm, start_head
    from draftsmith.train.loop import train

    recipe = session.recipe
    folder = recipe.run_dir / "train"
    with main_process_first(session.device) as main:
        samples = load_samples(session).samples
        # All that can be refused is refused before an earlier head is removed.
        train_index, heldout_index = split_samples(session, samples)
        warm = load_warm(session)
        vocab = draft_vocab(session, samples, train_index, None if warm is None else warm.draft_vocab)
        torch.manual_seed(recipe.seed)
        head = start_head(session, warm, vocab, samples)
        source = features_stage(session, samples)
        if session.begin("train", train_inputs(session)):
            return folder / "best"
    best = train(recipe, session.target, head, TrainData(source, train_index, heldout_index), folder)
    if main:
        session.finish("train", json.loads((folder / "summary.json").read_text(encoding="utf-8")))
    return best


def train_inputs(session: Session) -> dict[str, Any]:
    """What a trained head depends on."""
    recipe, warm = session.recipe, session.recipe.train.warm_start
    head = fingerprint_fields(recipe.head)
    for key in getattr(recipe.head, "MODELS", ()):
        if head.get(key) and Path(head[key]).is_dir():
            head[key] = fingerprint_directory(Path(head[key]))
    volatile = ("checkpoint_minutes", "workers", "warm_start")
    upstream = ("answers", "features") if recipe.features.source == "store" else ("answers",)
    return {
        **{stage: session.upstream(stage) for stage in upstream},
        **({} if recipe.answers.regenerate else data_inputs(session)),
        "layer_ids": layer_ids(session),
        "features.source": recipe.features.source,
        "features.dtype": recipe.features.dtype,
        "method": recipe.method,
        "head": head,
        "train": fingerprint_fields(recipe.train, volatile),
        # What a head holds counts, not where it lies; so with models above.
        **({} if warm is None else {"train.warm_start": head_digest(session, Path(warm))}),
        "data.heldout": recipe.data.heldout,
        "data.on_too_long": recipe.data.on_too_long,
        "num_speculative_tokens": recipe.evaluate.num_speculative_tokens,
        "seed": recipe.seed,
    }


def split_samples(session: Session, samples: list[Tokenized]) -> "tuple[list[int], list[int]]":
    """Leave out samples that do not fit a row, and split the rest into training and held-out answers."""
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
    names = [samples[i].conversation or samples[i].sample_id for i in fits]
    train_places, heldout = split_heldout(names, recipe.data.heldout)
    return [fits[i] for i in train_places], [fits[i] for i in heldout]


def find_head(session: Session, folder: Path | None = None, key: str = "") -> Path:
    """Return the folder of a trained head; `folder` is a head's or a run's, by default this run's.

    key: of the recipe, where that named it. Raises UserError where there is none and where its format cannot be loaded.
    """
    folder = folder or session.recipe.run_dir
    best = folder / "train" / "best"
    found = best if best.exists() or folder == session.recipe.run_dir else folder
    refuse_other_files(found)
    if weights_file(found) is None:
        raise UserError(_no_head(session, folder, key or "--head"))
    recognise(found)
    return found


def _no_head(session: Session, folder: Path, where: str) -> str:
    """Say why there is no head in a folder, by what is there instead."""
    if folder == session.recipe.run_dir:
        return f"There is no trained head in {folder}: run `draftsmith train` first, or name one with --head."
    if not folder.exists():
        hub = "a head on the Hub is fetched first, with `hf download NAME --local-dir FOLDER`"
        return f"{where}: there is no folder {folder}: check its name; {hub}."
    if not folder.is_dir():
        return f"{where}: {folder} is a file: name the folder that holds it."
    return f"{where}: there is no trained head in {folder}: train it first, or name another folder."


def head_digest(session: Session, folder: Path | None = None) -> str:
    """Identify the weights of a trained head; of a head in another format than a checkpoint what it is made of, too."""
    found = find_head(session, folder)
    files = all_weights_files(found)
    if recognise(found) is CHECKPOINT:
        return sha256_file(files[0])[:16]
    return fingerprint([sha256_file(file) for file in (found / CONFIG, *files)])


def load_best(
    session: Session, target: Target, folder: Path | None = None, *, warn: Callable[[str], None] | None = None
) -> Any:
    """Load a trained head for `target`, in float32. warn: told where it was made for another target, which None refuses."""
    return load_head(find_head(session, folder), target, warn=warn).to(target.device).eval()
