"""Which target it is: what tells one from another, from the files of its folder, without loading it as a model."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError
from draftsmith.heads.target.files import (
    EMBEDDINGS,
    find_projection,
    find_tensor,
    hash_chat_template,
    hash_json,
    hash_tokenizer,
    read_configs,
    read_eos_ids,
    read_object,
)
from draftsmith.heads.target.fingerprint import (
    fingerprint_directory,
    hash_tensor,
    hash_weights,
    read_directory,
    stable_config,
)
from draftsmith.typed_json import read_dataclass

if TYPE_CHECKING:
    from draftsmith.heads.target.target import Target

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TargetIdentity:
    """What tells targets apart. None: not known, and never compared.

    path: folder or Hub name, for people. vocab_size: rows of the output projection, padding included. fingerprint: of
    configuration and weights, see `fingerprint_directory`. config, weights, embeddings, lm_head, tokenizer, chat_template:
    hashes; tensors in the dtype as stored. tied: embeddings and lm_head are one matrix. eos_ids: sorted.
    """

    path: str | None = None
    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    fingerprint: str | None = None
    config: str | None = None
    weights: str | None = None
    embeddings: str | None = None
    lm_head: str | None = None
    tied: bool | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    eos_ids: tuple[int, ...] | None = None
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the plain object that `from_json` reads."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Any, source: str) -> "TargetIdentity":
        """Return the identity in a JSON object; absent keys are not known, as in checkpoints of earlier versions.

        Raises UserError, which names `source`, for values that mean nothing and for a later schema version.
        """
        if not isinstance(value, dict):
            raise UserError(f"{source} is damaged: its record of the target is no JSON object; restore it.")
        if (version := value.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
            raise UserError(
                f"{source} describes its target in schema version {version}, but this draftsmith reads {SCHEMA_VERSION}: "
                "use the version of draftsmith that wrote it."
            )
        known = {field.name: value.get(field.name) for field in fields(cls)}
        return read_dataclass(cls, known | {"schema_version": version}, source)

    def for_texts(self) -> "TargetIdentity":
        """Return what of it matters to a drafter that reads the text alone: tokens and template, not what is inside, of which
        the fingerprint stays, to tell another target."""
        return replace(
            self,
            hidden_size=None,
            num_layers=None,
            num_heads=None,
            config=None,
            weights=None,
            embeddings=None,
            lm_head=None,
        )

    def completed(self, other: "TargetIdentity") -> "TargetIdentity":
        """Return this identity with what is not known taken from `other`."""
        return replace(self, **{f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) is None})


def identify_directory(folder: Path, path: str | None = None) -> TargetIdentity:
    """Return the identity of the target in `folder` from its files alone; a folder of 16 GB takes about a second.

    path: the name it goes by, `folder` if left out. What the folder has no files for is None. Raises UserError for
    damaged files.
    """
    folder = Path(folder)
    raw = read_object(folder / "config.json")
    configs = read_configs(folder)
    text = configs[0] if configs else None
    spans = read_directory(folder)
    embeddings, projection = find_tensor(spans, EMBEDDINGS), find_projection(spans, folder)
    hashes = {span.name: hash_tensor(span) for span in (embeddings, projection) if span is not None}
    lm_head = hashes[projection.name] if projection else None
    return TargetIdentity(
        path=path or str(folder),
        architectures=tuple(raw["architectures"]) if raw.get("architectures") else None,
        model_type=raw.get("model_type"),
        vocab_size=projection.shape[0] if projection else getattr(text, "vocab_size", None),
        hidden_size=getattr(text, "hidden_size", None),
        num_layers=getattr(text, "num_hidden_layers", None),
        num_heads=getattr(text, "num_attention_heads", None),
        fingerprint=fingerprint_directory(folder) if raw and spans else None,
        config=hash_json(stable_config(folder)) if raw else None,
        weights=hash_weights(spans) if spans else None,
        embeddings=hashes[embeddings.name] if embeddings else None,
        lm_head=lm_head,
        tied=lm_head == hashes[embeddings.name] if embeddings and projection else None,
        tokenizer=hash_tokenizer(folder),
        chat_template=hash_chat_template(folder),
        eos_ids=read_eos_ids(folder),
    )


def identify_target(target: "Target") -> TargetIdentity:
    """Return the identity of a loaded target: of its folder where it has one, else what the model itself says."""
    known = TargetIdentity(
        path=target.path,
        architectures=tuple(getattr(target.model.config, "architectures", None) or [type(target.model).__name__]),
        model_type=target.model_type,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        num_heads=getattr(target.config, "num_attention_heads", None),
        fingerprint=target.fingerprint,
    )
    if target.directory is None:
        return replace(known, eos_ids=target.eos_ids or None)
    return known.completed(identify_directory(target.directory))
