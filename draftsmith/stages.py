"""The stages of a recipe: answers -> features -> train -> evaluate -> export. One function each.

Every stage first asks the run directory whether it is already there; it is then reused and said so.
"""

import sys
import time
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations import Conversation, load_conversations
from draftsmith.data.embedded import EmbeddedDefault, ensure_embedded
from draftsmith.data.extract import OnlineSource, extract
from draftsmith.data.features import FeatureSource, FeatureStore
from draftsmith.data.masks import TokenizedSet, tokenize_all
from draftsmith.data.regenerate import prepare_prompts, read_answers, regenerate
from draftsmith.data.templates import check_tokenizer, load_tokenizer
from draftsmith.errors import UserError
from draftsmith.eval.sampling import Sampling
from draftsmith.files import fingerprint
from draftsmith.heads.checkpoint import load_head
from draftsmith.heads.registry import METHODS
from draftsmith.heads.target import Target, load_target
from draftsmith.heads.vocab import choose_draft_vocab, count_tokens, coverage
from draftsmith.recipe import Recipe
from draftsmith.run import RunDirectory


def say(text: str) -> None:
    """Print a line about what is going on, apart from the results on standard output."""
    print(text, file=sys.stderr, flush=True)


class Session:
    """A recipe, its run directory, and what several stages load only once."""

    def __init__(self, recipe: Recipe, *, redo: tuple[str, ...] = ()) -> None:
        self.recipe = recipe
        self.redo = redo
        self.run = RunDirectory(recipe.run_dir)

    @cached_property
    def device(self) -> str:
        """The device that the recipe names; auto takes a GPU if there is one."""
        device = self.recipe.target.device
        if device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"target.device is {device!r} but torch sees no GPU here: use cpu, or run `draftsmith doctor`.")
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

    def load_target(self, dtype: str) -> Target:
        """Load the target in `dtype`."""
        spec = self.recipe.target
        return load_target(
            self.target_path,
            dtype=dtype,
            device=self.device,
            attn_implementation=spec.attn_implementation,
            trust_remote_code=spec.trust_remote_code,
        )

    @cached_property
    def target(self) -> Target:
        """The target in the dtype for answers and hidden states."""
        return self.load_target(self.recipe.target.dtype)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, checked against its vocabulary."""
        tokenizer = load_tokenizer(self.target_path, self.recipe.target.trust_remote_code)
        check_tokenizer(tokenizer, self.target.vocab_size)
        return tokenizer

    @cached_property
    def conversations(self) -> list[Conversation]:
        """The conversations to learn from."""
        spec = self.recipe.data
        sources = list(spec.sources)
        if not sources:
            if self.recipe.target.path != "embedded":
                raise UserError("data.sources is empty: name JSONL or Parquet files, folders or Hub data sets to learn from.")
            sources = [str(self.embedded.conversations)]
        return load_conversations(sources, split=spec.split, slice=spec.slice, limit=spec.limit)

    @property
    def answer_sampling(self) -> Sampling:
        """How the answers in the data were (or are taken to be) sampled."""
        spec = self.recipe.answers
        return Sampling(spec.temperature, spec.top_k, spec.top_p) if spec.regenerate else Sampling(1.0)

    def begin(self, stage: str, inputs: dict[str, Any]) -> bool:
        """Return True where the stage can be reused."""
        done = self.run.begin(stage, inputs, redo=stage in self.redo)
        if done:
            say(f"{stage}: reusing {self.recipe.run_dir}")
        return done

    def upstream(self, stage: str) -> str | None:
        """Return the fingerprint of an earlier stage, which later ones depend on."""
        record = self.run.record(stage)
        return record.fingerprint if record else None


def data_inputs(session: Session) -> dict[str, Any]:
    """What the answers depend on."""
    recipe = session.recipe
    return {
        "target": session.target.fingerprint,
        "target.dtype": recipe.target.dtype,
        "data": {key: value for key, value in asdict(recipe.data).items() if key not in ("heldout", "on_too_long")},
        "conversations": fingerprint([asdict(c) for c in session.conversations]),
        "answers": {key: value for key, value in asdict(recipe.answers).items()},
        "seed": recipe.seed,
    }


def answers_stage(session: Session) -> Path | None:
    """Let the target answer the prompts; None where the recipe takes the answers in the data."""
    recipe, spec = session.recipe, session.recipe.answers
    if not spec.regenerate:
        return None
    path = recipe.run_dir / "answers.jsonl"
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
    regenerate(
        session.target, session.tokenizer, prompts, path, sampling=session.answer_sampling, batch=spec.batch
    )
    seconds = time.perf_counter() - started
    facts = answer_facts(path) | {"seconds": seconds}
    session.run.finish("answers", facts)
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


def layer_ids(session: Session) -> tuple[int, ...]:
    """The layers that the head reads."""
    chosen = getattr(session.recipe.head, "layer_ids", None)
    return tuple(chosen) if chosen is not None else session.target.default_layer_ids()


def features_stage(session: Session, samples: list[Tokenized]) -> FeatureSource:
    """Return the hidden states of the samples: from a store that is made once, or computed on demand."""
    recipe, spec = session.recipe, session.recipe.features
    stored = tuple(spec.layer_ids) if spec.layer_ids is not None else layer_ids(session)
    if spec.source == "online":
        return OnlineSource(session.target, samples, stored, dtype=spec.dtype, batch_tokens=spec.batch_tokens)
    path = recipe.run_dir / "features"
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
        session.run.finish("features", {"tokens": tokens, "seconds": seconds, "bytes": size})
        say(f"features: {tokens} tokens in {seconds:.0f} s, {path}")
    return FeatureStore(path, fingerprint=session.target.fingerprint, verify=spec.verify)


def split_heldout(ids: list[str], count: int) -> "tuple[list[int], list[int]]":
    """Split samples into (train, held out) by a hash of their ids, the same for every run over the same data."""
    if count >= len(ids):
        raise UserError(f"data.heldout is {count} but there are only {len(ids)} answers: lower it or add data.")
    order = sorted(range(len(ids)), key=lambda i: fingerprint(ids[i]))
    return sorted(order[count:]), sorted(order[:count])


def draft_vocab(session: Session, samples: list[Tokenized], train: list[int]) -> torch.Tensor | None:
    """Choose the draft vocabulary from the training answers and warn where it covers too little."""
    size = getattr(session.recipe.head, "draft_vocab_size", None)
    vocab_size = session.target.vocab_size
    if size is None or size >= vocab_size:
        return None
    always = [i for i in {*session.target.eos_ids, *session.tokenizer.all_special_ids} if i < vocab_size]
    counts = count_tokens([samples[i] for i in train], vocab_size)
    vocab = choose_draft_vocab(counts, size, always)
    share = coverage(counts, vocab)
    by_slice = {}
    for name in sorted({samples[i].slice for i in train}):
        part = count_tokens([samples[i] for i in train if samples[i].slice == name], vocab_size)
        by_slice[name] = coverage(part, vocab)
    low = [f"{name} {value:.1%}" for name, value in by_slice.items() if value < 0.95]
    say(f"draft vocab: {size} of {vocab_size} tokens cover {share:.2%} of the supervised tokens")
    if low:
        say(f"warning: it covers less than 95% in {', '.join(low)}: raise head.draft_vocab_size.")
    return vocab


def train_stage(session: Session) -> Path:
    """Train the head on what the earlier stages made; return the folder of the best one."""
    from draftsmith.train.loop import TrainData, train

    recipe = session.recipe
    samples = load_samples(session).samples
    source = features_stage(session, samples)
    volatile = ("checkpoint_minutes", "workers")
    inputs = {
        "answers": session.upstream("answers"),
        "features": session.upstream("features"),
        "layer_ids": layer_ids(session),
        "method": recipe.method,
        "head": asdict(recipe.head),
        "train": {key: value for key, value in asdict(recipe.train).items() if key not in volatile},
        "data.heldout": recipe.data.heldout,
        "num_speculative_tokens": recipe.evaluate.num_speculative_tokens,
        "seed": recipe.seed,
    }
    folder = recipe.run_dir / "train"
    if session.begin("train", inputs):
        return folder / "best"
    fits = [i for i, sample in enumerate(samples) if len(sample.ids) <= recipe.train.row_tokens]
    if len(fits) < len(samples):
        say(
            f"warning: {len(samples) - len(fits)} samples are longer than train.row_tokens={recipe.train.row_tokens} and "
            "are left out of training: raise it, or lower data.max_length."
        )
    train_places, heldout = split_heldout([samples[i].sample_id for i in fits], recipe.data.heldout)
    train_index, heldout_index = [fits[i] for i in train_places], [fits[i] for i in heldout]
    vocab = draft_vocab(session, samples, train_index)
    torch.manual_seed(recipe.seed)
    head = METHODS[recipe.method].build(recipe.head, session.target, vocab)
    folder.mkdir(parents=True, exist_ok=True)
    best = train(recipe, session.target, head, TrainData(source, train_index, heldout_index), folder)
    session.run.finish("train", {"folder": str(best)})
    return best


def load_best(session: Session, target: Target, folder: Path | None = None) -> Any:
    """Load a trained head for `target` (by default the run's best) in the target's dtype."""
    folder = folder or session.recipe.run_dir / "train" / "best"
    if not folder.exists():
        raise UserError(f"There is no trained head in {folder}: run `draftsmith train` first, or name one with --head.")
    return load_head(folder, target).to(target.device, target.dtype).eval()


def export_stage(session: Session, head_folder: Path | None = None) -> Path:
    """Write the trained head as the directory that an engine loads, and check it by loading it again."""
    from draftsmith.heads.export import export_head

    recipe, spec = session.recipe, session.recipe.export
    destination = recipe.run_dir / "export" / spec.layout
    inputs = {"train": session.upstream("train"), "head": str(head_folder or ""), "export": asdict(spec)}
    if session.begin("export", inputs):
        return destination
    head = load_best(session, session.load_target("float32"), head_folder)
    dtype = spec.dtype if spec.dtype != "auto" else str(session.target.dtype).removeprefix("torch.")
    export_head(
        head,
        session.target,
        destination,
        layout=spec.layout,
        dtype=dtype,
        include_embeddings=spec.include_embeddings,
    )
    session.run.finish("export", {"folder": str(destination)})
    say(f"export: {destination}")
    return destination


def with_output(recipe: Recipe, output_dir: str | None) -> Recipe:
    """Return the recipe with another run directory."""
    return replace(recipe, output_dir=output_dir) if output_dir else recipe
