"""The stage that provides the target's hidden states: stored once, or computed on demand."""

import time

from draftsmith.data.batch import Tokenized
from draftsmith.data.features.extract import OnlineSource, extract
from draftsmith.data.features.store import FeatureSource, FeatureStore
from draftsmith.heads.base import layer_ids_of
from draftsmith.stages.answers import answer_inputs
from draftsmith.stages.session import Session, say


def features_stage(session: Session, samples: list[Tokenized]) -> FeatureSource:
    """Return the hidden states of `samples`: from a store that is made once, or computed on demand."""
    recipe, spec = session.recipe, session.recipe.features
    stored = stored_layers(session)
    if spec.source == "online":
        return OnlineSource(session.target, samples, stored, dtype=spec.dtype, batch_tokens=spec.batch_tokens)
    path = recipe.data_path / "features"
    inputs = answer_inputs(session) if not recipe.answers.regenerate else {"answers": session.upstream("answers")}
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


def head_layers(session: Session) -> tuple[int, ...]:
    """Return the layers that the head reads."""
    return layer_ids_of(session.head_options, session.target)


def stored_layers(session: Session) -> tuple[int, ...]:
    """Return the layers to store: those that the recipe names, else those that the head reads.

    A finished store that holds more than the head reads (another recipe's, in a shared data_dir) is taken as it is.
    """
    if session.recipe.features.layer_ids is not None:
        return tuple(session.recipe.features.layer_ids)
    needed, known = head_layers(session), session.data.record("features")
    if known and known.state == "done" and "features" not in session.redo:
        present = tuple(known.inputs.get("layer_ids", ()))
        return present if set(needed) <= set(present) else needed
    return needed
