"""The stages that make what the head learns from: the target's answers, and its hidden states, stored or on demand."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.data.answers.generate import read_answers, regenerate, server_of
from draftsmith.data.answers.served import AnswerServer, likeness
from draftsmith.data.batch import Tokenized
from draftsmith.data.conversations.left_out import OnRefused, Refusals, left_out
from draftsmith.data.conversations.load import Conversation
from draftsmith.data.conversations.masks import tokenize_all, tokenize_conversation
from draftsmith.data.conversations.templates import prepare_prompts, render_text, template_name
from draftsmith.data.features.extract import OnlineSource, extract
from draftsmith.data.features.index import StoredSamples, read_index
from draftsmith.data.features.store import FeatureSource, FeatureStore
from draftsmith.data.team import Alone
from draftsmith.errors import UserError
from draftsmith.fields import fingerprint_fields
from draftsmith.heads.base import layer_ids_of
from draftsmith.heads.layers.from_target import final_norm_weight
from draftsmith.progress import say
from draftsmith.stages.session import Session, makers, team
from draftsmith.target.parts import PARTS, write_parts
from draftsmith.train.process import world

_LOOKED_AT = 64
"""Conversations that are rendered before the target is loaded."""
_DATA = {"answers": {"conversations"}, "features": {"answers", "conversations"}}
"""The inputs of a stage that say which data: where they alone changed, what it made is added to."""


def answer_inputs(session: Session) -> dict[str, Any]:
    """Return what the answers depend on, as run.json records it."""
    recipe = session.recipe
    # Sources count by what they say, not by where they lie; the rest matters to later stages only.
    elsewhere = ("sources", "split", "slice", "limit", "heldout", "on_too_long", "on_refused", "chat_template", "date")
    return {
        "conversations": session.conversations_digest,  # first: a wrong path is reported before the target is loaded
        "target": session.target.fingerprint,
        "target.dtype": session.target.dtype_name,
        "eos": list(session.target.eos_ids),
        "tokenizer": session.tokenizer_digest,
        "data": fingerprint_fields(recipe.data, elsewhere),
        "answers": fingerprint_fields(
            recipe.answers, ("servers", "served_name")
        ),  # who answers changes no distribution
        "seed": recipe.seed,
        **session.dated,
    }


def look_at(
    session: Session, conversations: Sequence[Conversation], *, learned: bool, on_refused: OnRefused | None = None
) -> None:
    """Render the first conversations, before the target is loaded. learned: with their answers, else as prompts. on_refused: that of
    the recipe, for data to learn from.

    Raises UserError, naming the sample, for what the chat template refuses or leaves out.
    """
    try:
        tokenizer = session.unchecked_tokenizer
    except UserError:
        return  # which loading the target explains
    data, refusals = session.recipe.data, Refusals(on_refused)
    for conversation in conversations[:_LOOKED_AT]:
        with refusals.of(conversation.id):
            if learned:
                tokenize_conversation(
                    tokenizer, conversation, max_length=data.max_length, template_kwargs=data.template
                )
            else:
                render: Callable[..., str] = partial(render_text, tokenizer, name=conversation.id, **data.template)
                asked = replace(conversation, messages=conversation.prompt())
                render(asked.messages, asked.tools, generation_prompt=True)
                left_out(asked, render, template_name(tokenizer))


def answers_stage(session: Session) -> Path | None:
    """Let the target answer the prompts and return the file; None where the recipe takes the answers in the data.

    All processes call it, and share the prompts out, but for those that servers answer."""
    spec, ours = session.recipe.answers, team()
    if not spec.regenerate:
        return None
    path, servers = answers_file(session), list[AnswerServer]()

    def begin() -> bool:
        inputs = answer_inputs(session)
        # Only where some are named is it looked up twice whether the answers are there: a finished run needs no server.
        anew = spec.servers and ("answers" in session.redo or not session.data.holds("answers", inputs))
        asked = spec.servers if anew else []
        if asked and session.recipe.target.tensor_parallel > 1:
            raise UserError(
                f"target.tensor_parallel is {session.recipe.target.tensor_parallel}, but one process compares the answers of answers.servers "
                "with the target's own: make them with target.gpus in its place, then go on with this recipe."
            )
        servers.extend(AnswerServer(url, [spec.served_name or session.target_path]) for url in asked)
        _grow(session, "answers", inputs, _DATA["answers"])
        if done := session.begin("answers", inputs):
            _warn_again(session, "answers")
        return done

    if ours.tell(begin):
        return path
    started, before, resumed = time.perf_counter(), 0, path.with_name(f"{path.name}.partial").exists()
    if not (spec.servers and ours.rank):
        session.load_layers()
        before = len(session.warnings)
        started = _answer(session, path, servers)
    ours.tell(lambda: _finish_answers(session, path, servers, time.perf_counter() - started, before, resumed=resumed))
    return path


def kept_warnings(session: Session, stage: str) -> Sequence[str]:
    """Return what was warned of when the data of a stage were made."""
    record = session.data.record(stage)
    found: Sequence[str] = () if record is None else record.facts.get("warnings", ())
    return found


def _warn_again(session: Session, stage: str) -> None:
    """Warn of what was found when the data of a finished stage were made, for the results of this run."""
    for text in kept_warnings(session, stage):
        session.warn(text)


def _answer(session: Session, path: Path, servers: Sequence[AnswerServer]) -> float:
    """Make the answers; return when that began."""
    recipe, spec = session.recipe, session.recipe.answers
    refusals = Refusals(recipe.data.on_refused)
    prompts = prepare_prompts(
        session.tokenizer,
        session.conversations,
        max_new_tokens=lambda slice_name: spec.max_new_tokens,
        max_length=min(recipe.data.max_length, session.target.context_length),
        template=recipe.data.template,
        refusals=refusals,
        warn=session.warn,
    )
    say(f"answers: {len(prompts)} of {len(session.conversations)} prompts, at temperature {spec.temperature}")
    kept = {prompt.conversation.id for prompt in prompts}.union(refusals.names)
    if left := [conversation.id for conversation in session.conversations if conversation.id not in kept]:
        say(
            f"answers: {', '.join(left[:3])}{', ...' * (len(left) > 3)} left out: no room for an answer within data.max_length"
        )
    started = time.perf_counter()
    regenerate(
        session.target,
        session.tokenizer,
        prompts,
        path,
        sampling=spec.sampling,
        seed=recipe.seed,
        batch=spec.batch,
        servers=servers,
        kept=session.data.kept("answers", _DATA["answers"]),
        team=Alone() if spec.servers else makers(recipe),
    )
    session.target.kept_passes = None  # whose memory the training needs
    return started


def _finish_answers(
    session: Session, path: Path, servers: Sequence[AnswerServer], seconds: float, before: int, *, resumed: bool
) -> None:
    """Record the answers. before: how many warnings there were that are not about them."""
    samples, slices = read_answers(path).samples, dict[str, list[tuple[int, ...]]]()
    for sample in samples:
        slices.setdefault(sample.slice, []).append(tuple(sample.ids[sample.mask].tolist()))
    facts: dict[str, Any] = {
        "answers": len(samples),
        "output_tokens": sum(int(s.mask.sum()) for s in samples),
        "distinct_share": {name: len(set(texts)) / len(texts) for name, texts in sorted(slices.items())},
        "seconds": seconds,
    }
    if servers:
        # Those of servers that answered an earlier part of the data, too.
        known, by_server = server_of(path), dict[str, list[Tokenized]]()
        for sample in samples:
            if sample.sample_id in known:
                by_server.setdefault(known[sample.sample_id], []).append(sample)
        facts |= {"servers": [server.engine for server in servers], "likeness": {}}
        for url, made in by_server.items():
            measured = likeness(session.target, made, session.recipe.answers.sampling)
            facts["likeness"][url] = asdict(measured)
            if measured.differs:
                session.warn(
                    f"the answers of {url} are not the target's own: {measured}; serve the recipe's target in its dtype, unquantized and without "
                    "settings of its own for sampling, or name as target what is served."
                )
            else:
                say(f"answers: those of {url} are samples of the target: {measured}")
    session.finish("answers", facts | {"warnings": session.warnings[before:]})
    part = "the rest of them " if resumed else ""
    say(f"answers: {facts['answers']} answers, {facts['output_tokens']} tokens, {part}in {seconds:.0f} s, {path}")


def _grow(session: Session, stage: str, inputs: dict[str, Any], keys: set[str]) -> None:
    """Let a stage of which the data alone changed keep what it made for conversations that are still there.

    keys: the inputs that say which data. Raises UserError, before anything is moved, where a head was trained on the earlier data
    and is not to be made again.
    """
    run = session.directory(stage)
    changed = set() if stage in session.redo or not world().main else set(run.changed(stage, inputs))
    if not changed or not changed <= keys:
        return
    trained = run is session.run and run.record("train") is not None and run.has_work("train")
    if trained and "train" not in session.redo:
        if other := run.maker(stage):
            raise UserError(
                f"The {stage} in {run.path} are now those of the run in {other} ({run.describe_changes(stage, inputs)}), which shares them: the head "
                "that was trained here stays as it is; to make its data again, give this run a --data_dir of its own."
            )
        raise UserError(
            f"The data changed ({run.describe_changes(stage, inputs)}) since a head was trained in {run.path}: give the new head another "
            f"--output_dir, with --data_dir {run.path} to add to the {stage} there, or make it again with `draftsmith train "
            "--redo train`."
        )
    run.grow(stage, inputs)
    if run.kept(stage, keys):
        say(f"{stage}: those of conversations that are still in the data under their ids are kept")


def answers_file(session: Session) -> Path:
    """Return the file of the target's answers, whether it is there or not."""
    return session.recipe.data_path / "answers.jsonl"


def load_samples(session: Session, answers: Path | None, count: int | None = None) -> list[Tokenized]:
    """Return the samples that the head learns from, and say what was left out; makes nothing.

    answers: the file that `answers_stage` returned; None tokenizes the conversations of the data as they are, the first `count` of them.
    """
    data = session.recipe.data
    limit = min(data.max_length, session.target.context_length)
    if answers is None:
        tokenized = tokenize_all(
            session.tokenizer,
            session.conversations[:count],
            max_length=limit,
            on_too_long=data.on_too_long,
            on_refused=data.on_refused,
            template_kwargs=data.template,
            eos_ids=session.target.eos_ids,
            warn=session.warn,
        )
    else:
        tokenized = read_answers(answers, max_length=limit, on_too_long=data.on_too_long)
    say(f"data: {tokenized.stats}", once=True)
    return tokenized.samples


def samples_at_hand(session: Session, count: int) -> list[Tokenized]:
    """Return `count` samples to look at: of the recipe's own answers where these are finished, else of the data as they are, of which
    no more is read than that takes; none where data for the target to answer hold no answers yet."""
    own = session.recipe.answers.regenerate
    finished = own and session.data.holds("answers", answer_inputs(session))
    if finished:
        return load_samples(session, answers_file(session))[:count]
    whole, samples, why = len(session.conversations), list[Tokenized](), ""
    for some in sorted({min(n, whole) for n in (count, 100 * count, whole)}):
        try:
            samples = load_samples(session, None, some)[:count]
        except UserError as error:  # the first few may have nothing to learn, or be too long
            if some == whole and not own:
                raise
            why = str(error).rstrip(".")
        if len(samples) == count:
            break
    if own:
        shown = ": those of the data stand here for them" if samples else f", and the data hold none to show ({why})"
        say(f"answers.regenerate is true, but the target's own answers are not made yet{shown}")
    return samples


def stored_samples(session: Session) -> StoredSamples | None:
    """Return the samples of a finished store, which are not tokenized again; None where there is none."""
    if session.recipe.features.source == "online" or "features" in session.redo:
        return None
    if not session.data.holds("features", feature_inputs(session, session.upstream("answers"), stored_layers(session))):
        return None
    _warn_again(session, "features")
    return read_index(session.recipe.data_path / "features").samples


def begin_features(session: Session) -> bool:
    """Return whether hidden states are to be stored: neither computed on demand nor there."""
    if session.recipe.features.source == "online":
        return False
    inputs = feature_inputs(session, session.upstream("answers"), stored_layers(session))
    _grow(session, "features", inputs, _DATA["features"])
    return not session.begin("features", inputs)


def features_stage(
    session: Session, samples: Sequence[Tokenized], *, todo: bool, warnings: Sequence[str] = ()
) -> FeatureSource:
    """Return the hidden states of `samples`: from a store that is made once, or computed on demand.

    All processes call it, and share the store's chunks out; only rank 0 needs the samples for that. todo: of `begin_features`, on rank 0.
    warnings: those about the samples, to be given again with the store."""
    spec, ours = session.recipe.features, team()
    if spec.source == "online":
        return OnlineSource(
            session.target, samples, stored_layers(session), dtype=spec.dtype, batch_tokens=spec.batch_tokens
        )
    path = session.recipe.data_path / "features"
    if todo:
        resumed = "the rest of them " if any(path.glob("shard-*.safetensors")) else ""
        started, stored = time.perf_counter(), stored_layers(session)
        session.load_layers()
        store = extract(
            session.target,
            samples,
            path,
            layer_ids=stored,
            dtype=spec.dtype,
            batch_tokens=spec.batch_tokens,
            shard_bytes=spec.shard_mb * 2**20,
            kept=next((file.parent for file in session.data.kept("features", _DATA["features"])), None),
            team=makers(session.recipe),
        )

        def finish() -> None:
            seconds, tokens = time.perf_counter() - started, sum(store.lengths)
            size = sum(f.stat().st_size for f in path.glob("*.safetensors"))
            write_parts(session.target, path / PARTS, stored, final_norm_weight(session.target))
            session.finish(
                "features", {"tokens": tokens, "seconds": seconds, "bytes": size, "warnings": list(warnings)}
            )
            say(f"features: {tokens} tokens, {resumed}in {seconds:.0f} s, {path}")

        ours.tell(finish)  # after the store was opened, before earlier ones are removed
    return FeatureStore(path, fingerprint=session.target.fingerprint, verify=spec.verify)


def feature_inputs(session: Session, answers: str | None, layers: tuple[int, ...]) -> dict[str, Any]:
    """Return what hidden states depend on, as run.json records it. answers: the fingerprint of the target's."""
    recipe, spec = session.recipe, session.recipe.features
    return (answer_inputs(session) if not recipe.answers.regenerate else {"answers": answers}) | {
        "layer_ids": layers,
        "features.dtype": spec.dtype,
        "features.batch_tokens": spec.batch_tokens,
        "features.shard_mb": spec.shard_mb,
        "data.on_too_long": recipe.data.on_too_long,
    }


def head_layers(session: Session) -> tuple[int, ...]:
    """Return the layers that the head reads."""
    return layer_ids_of(session.head_options, session.target)


def stored_layers(session: Session) -> tuple[int, ...]:
    """Return the layers to store: those that the recipe names, else those that the head reads.

    A store that holds more than the head reads (another recipe's, in a shared data_dir), finished or not, is taken as it is.
    """
    if session.recipe.features.layer_ids is not None:
        return tuple(session.recipe.features.layer_ids)
    needed, known = head_layers(session), session.data.record("features")
    if known and known.there and "features" not in session.redo:
        present = tuple(known.inputs.get("layer_ids", ()))
        return present if set(needed) <= set(present) else needed
    return needed
