"""The drafters of `evaluate.baselines`: prompt lookup, and draft models that share the target's tokens."""

from pathlib import Path

from draftsmith.data.templates import read_tokenizer
from draftsmith.errors import UserError
from draftsmith.eval.contender import Contender, draft_model_contender, prompt_lookup_contender
from draftsmith.eval.draft_model import check_context
from draftsmith.eval.prompt_lookup import MAX_NGRAM
from draftsmith.eval.selfcheck import check_decoding
from draftsmith.heads.shared_tokens import check_same_tokens
from draftsmith.heads.target import Target, load_target
from draftsmith.session import Session


def make_baselines(session: Session, target: Target, longest: int) -> list[Contender]:
    """Return the recipe's baselines, draft models in the dtype of `target`. longest: tokens of the longest text that will
    be decoded. Raises UserError for a draft model that cannot draft for `target`."""
    spec = session.recipe.evaluate
    lengths = (spec.num_speculative_tokens, spec.max_k)
    found = []
    for baseline in spec.baselines:
        if baseline.path is None:
            ngram = baseline.max_ngram or MAX_NGRAM
            name = "prompt lookup" if ngram == MAX_NGRAM else f"prompt lookup, {ngram}-grams"
            found.append(prompt_lookup_contender(name, *lengths, max_ngram=ngram))
        else:
            model = load_draft_model(session, target, baseline.path)
            check_context(f"draft model {model.path}", model.context_length, longest + spec.max_k)
            name = f"draft model {Path(model.path).name}"
            found.append(draft_model_contender(name, model, target.vocab_size, *lengths))
    return found


def load_draft_model(session: Session, target: Target, path: str) -> Target:
    """Load a draft model, checked as a target is, with the tokenizer compared first. Raises UserError."""
    if path == session.target_path:
        raise UserError(f"evaluate.baselines names the target {path} as its own draft model: take a smaller one.")
    check_path(path)
    try:
        check_same_tokens(session.tokenizer, read_tokenizer(path), path)
        model = load_target(
            path,
            dtype=target.dtype_name,
            device=session.device,
            attn_implementation=session.recipe.target.attn_implementation,
        )
        check_decoding(model)
    except UserError as error:
        raise UserError(f"evaluate.baselines names a draft model that cannot be used: {error}") from error
    return model


def check_path(path: str) -> None:
    """Raise UserError for a local folder that is not there, without asking the Hub for it."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if looks_local and not Path(path).is_dir():
        raise UserError(
            f"evaluate.baselines names the draft model {path}, but there is no such folder: give one, or a Hub name "
            "owner/model."
        )
