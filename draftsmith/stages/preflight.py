"""Checks before a command spends hours of work: mistakes in the recipe, and what does not fit together."""

import torch

from draftsmith.data.conversations.left_out import some_of
from draftsmith.data.features.store import readable_bytes
from draftsmith.errors import UserError
from draftsmith.estimate.counting import HeadCost
from draftsmith.eval.drafters.system import SystemUnderTest
from draftsmith.heads.adapter import adapter_of
from draftsmith.heads.base import DraftHead
from draftsmith.heads.export.export import convert_head
from draftsmith.heads.formats.layout import engines_notice, find_layout, layouts_of, version_notice
from draftsmith.heads.layers.decoder_layer import EagleAttention
from draftsmith.heads.layers.ttt_attention import why_eager
from draftsmith.machine import available_memory, emulates_bf16
from draftsmith.progress import say
from draftsmith.recipe.schema import Recipe
from draftsmith.stages.data import look_at
from draftsmith.stages.drafters import (
    check_named_drafters,
    load_compared,
    load_heads,
    load_warm,
    select_drafters,
    warm_folder,
)
from draftsmith.stages.evaluation import conversations_of, prompts_of
from draftsmith.stages.exporting import check_adapter, export_options
from draftsmith.stages.session import Session
from draftsmith.stages.training import initial_head, pick_draft_vocab
from draftsmith.storage import check_folder, fingerprint
from draftsmith.target.shape import shape_of
from draftsmith.target.target import Target
from draftsmith.train.parallel import autocast_dtype, check_launch
from draftsmith.train.trackers import check_installed


def preflight(session: Session, command: str) -> list[SystemUnderTest]:
    """Find mistakes in a recipe before `draftsmith COMMAND` spends hours of work on it, those first that need no target.

    Before training or extraction: makes the head that training starts from, and checks it against the loss, the stored
    layers and the export. Before an evaluation: checks prompts, drafts, heads and baselines, and returns the drafters. An
    export checks itself before it writes.
    """
    recipe = session.recipe
    if command in ("evaluate", "export"):
        _ = session.head_folder
    check_folder("output_dir", recipe.run_dir)
    check_folder("data_dir", recipe.data_path)
    check_launch(recipe.train)
    check_installed(recipe.tracking)
    learning, evaluating = command in ("run", "train"), command in ("run", "evaluate")
    making = learning or command == "extract"
    count = len(session.conversations) if making else 0
    if learning and recipe.answers.regenerate and recipe.data.heldout >= count:
        raise UserError(
            f"data.heldout is {recipe.data.heldout} but there are only {count} conversations: lower it or add data."
        )
    if making:
        warm_folder(recipe)
        look_at(
            session,
            session.conversations,
            learned=not recipe.answers.regenerate,
            on_refused=recipe.data.on_refused,
        )
    if evaluating:
        look_at(session, conversations_of(session), learned=False)
        if learning:
            _warn_of_learned_prompts(session)
        check_named_drafters(recipe)
    untrained = _check_initial_head(session, exporting=command == "run") if making else None
    if untrained is not None:
        _check_attention(session, untrained if learning else None)
    _warn_of_slow_dtypes(session, making, learning, evaluating)
    _warn_of_settings_without_effect(recipe, making, learning)
    if not evaluating:
        return []
    target = session.target
    if untrained is None:
        heads = load_heads(recipe, session.head_folder, target, session.warn)
        own = next(iter(heads.values())).method
        if recipe.export.layout is not None and layouts_of(own):  # whose engines a plan starts
            find_layout(export_options(recipe, own)["layout"], own)
    else:
        heads = {untrained.method: untrained} | load_compared(recipe, target, untrained.method, session.warn)
    longest, compared = prompts_of(session, target).longest_text, session.original is not None
    return select_drafters(recipe, heads, target, longest, session.tokenizer, session.warn, compared=compared)


def _warn_of_learned_prompts(session: Session) -> None:
    """Warn of prompts to measure on that the data to learn from hold, too."""
    prompts: dict[str, list[str]] = {}  # ids by text
    lengths: set[int] = set()
    for one in conversations_of(session):
        asked = one.prompt()
        lengths.add(len(asked))
        prompts.setdefault(fingerprint(asked), []).append(one.id)
    texts = (fingerprint(row.messages[:length]) for row in session.conversations for length in lengths)
    if learned := {prompt for text in texts for prompt in prompts.get(text, ())}:
        count = sum(map(len, prompts.values()))
        session.warn(
            f"{len(learned)} of the {count} prompts of evaluate.prompts ({some_of(sorted(learned))}) are in data.sources, too: what a head reaches on "
            "prompts that it has learned says little of others; take them out of one of the two (data.split, evaluate.split)."
        )


def _warn_of_settings_without_effect(recipe: Recipe, making: bool, learning: bool) -> None:
    """Warn of settings that have no effect, given others of the recipe."""
    keys, answers = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"), recipe.answers
    drawn = [key for key in keys if getattr(answers, key) != getattr(type(answers), key)]
    if making and not answers.regenerate and drawn:
        say(
            f"warning: answers.{drawn[0]} is set, but answers.regenerate is false: what is learned is the data's answers, whose "
            "held-out acceptance is measured as that of plain samples at temperature 1; set answers.regenerate to true, or leave the key out."
        )
    if making and answers.served_name is not None and not answers.servers:
        say(
            f"warning: answers.served_name is {answers.served_name}, but answers.servers names none, so that the target answers here: name "
            "them, or leave it out."
        )
    if learning and recipe.train.optimizer != "muon" and recipe.train.muon_lr != type(recipe.train).muon_lr:
        say(
            f"warning: train.muon_lr is {recipe.train.muon_lr}, but train.optimizer is {recipe.train.optimizer}, which takes "
            "train.lr alone: set train.optimizer to muon, or leave train.muon_lr out."
        )
    spec = recipe.features
    stored = [key for key in ("shard_mb", "verify") if getattr(spec, key) != getattr(type(spec), key)]
    if learning and spec.source == "online" and stored:
        say(
            f"warning: {' and '.join(f'features.{key} is {getattr(spec, key)}' for key in stored)}, but features.source is online, which "
            "stores nothing: set the source to store, or leave this out."
        )


def _warn_of_slow_dtypes(session: Session, making: bool, learning: bool, evaluating: bool) -> None:
    """Warn of settings that compute in bf16 on a processor that emulates it."""
    if not emulates_bf16(session.device):
        return
    recipe = session.recipe
    slow = {
        "target.dtype to float32": making and session.target.dtype == torch.bfloat16,
        'train.precision to "no"': learning and recipe.train.precision == "bf16",
        "evaluate.dtype to float32": evaluating and recipe.evaluate.dtype == "bfloat16",
    }
    if changes := [change for change, needed in slow.items() if needed]:
        say(
            "warning: this CPU emulates bf16, which takes ten times as long as fp32 or more: set "
            f"{' and '.join(changes)}."
        )


def _check_attention(session: Session, head: DraftHead | None) -> None:
    """Warn where attention on a GPU keeps the scores of all pairs of tokens. Raises UserError where these do not fit there. head: the
    one that is trained, None for an extraction."""
    target, recipe = session.target, session.recipe
    if target.device.type != "cuda":
        return
    if target.config._attn_implementation == "eager":
        tokens = min(recipe.data.max_length, target.context_length)
        asked = recipe.target.attn_implementation == "eager"
        why, remedy = (
            ("target.attn_implementation is eager", "set it to sdpa") if asked else ("its class has no other", "")
        )
        size = 4 * target.config.num_attention_heads * tokens**2
        _say_eager(
            f"The target's attention is eager ({why})",
            size,
            f"a text of {tokens} tokens",
            remedy,
            "data.max_length",
            target,
        )
    parts = [] if head is None else [part for part in head.modules() if isinstance(part, EagleAttention)]
    dtype = autocast_dtype(target.device, recipe.train) or torch.float32
    if head is None or not parts or (slow := why_eager(parts[0].head_dim, dtype, target.device)) is None:
        return
    tokens, rows = recipe.train.row_tokens, recipe.train.rows
    cost = HeadCost(head.method, head.options, shape_of(target.model.config, target.dtype.itemsize), target.path)
    # Of the FLOPs of causal attention, seven products for half of all pairs.
    scores = cost.of_text(1, tokens - 1, recipe.train.loss).attention / (7 * parts[0].head_dim)
    what = f"The head's attention runs without the GPU's flash kernel ({slow[0]})"
    where = f"{rows} rows of {tokens} tokens"
    _say_eager(what, int(rows * scores * dtype.itemsize), where, slow[1], "train.rows or train.row_tokens", target)


def _say_eager(what: str, size: int, where: str, remedy: str, smaller: str, target: Target) -> None:
    """Warn of `size` bytes of scores; raise UserError where there is no room for them. remedy, smaller: what to do, and what to
    lower."""
    free = available_memory(target.device)
    kept = f"{what} and keeps all scores, {readable_bytes(size)} or more for {where}"
    if size > free:
        raise UserError(
            f"{kept}, but {target.device} has {readable_bytes(free)} free: {remedy and f'{remedy}, or '}lower {smaller}."
        )
    say(f"warning: {kept}, which is slow: {remedy or f'lower {smaller} where memory is short'}.")


def _check_initial_head(session: Session, exporting: bool) -> DraftHead:
    """Return the head that training starts from, checked against what is stored and exported."""
    recipe, target = session.recipe, session.target
    _ = session.tokenizer  # checks it against the target and data.template
    warm = load_warm(recipe, target)
    head = initial_head(session, warm, pick_draft_vocab(session, warm))
    recipe.train.loss.check_head(head)
    length = min(recipe.data.max_length, target.context_length)
    if recipe.data.max_length > length:
        say(
            f"warning: data.max_length is {recipe.data.max_length}, but the target {target.path} reads {length} tokens, which is the most "
            f"that a sample may have: set data.max_length to {length}."
        )
    if head.reads.context_length is not None and head.reads.context_length < length:
        raise UserError(
            f"data.max_length lets samples of {length} tokens through, but the head reads at most {head.reads.context_length}: set "
            f"data.max_length to {head.reads.context_length}, or start from a model with a longer context."
        )
    stored = recipe.features.layer_ids
    if stored is not None:
        target.check_layer_ids(tuple(stored), "features.layer_ids")
        if missing := sorted(set(head.reads.layer_ids) - set(stored)):
            raise UserError(
                f"features.layer_ids {stored} lacks {missing}, which head.layer_ids reads: add them, or leave "
                "features.layer_ids out."
            )
    check_adapter(recipe, head)
    if layouts_of(recipe.method) or recipe.export.layout:
        options = export_options(recipe, recipe.method)
        try:
            # With an adapter in its weights a head has the tensors of its base.
            files = convert_head(head if warm is None or adapter_of(head) is None else warm, target, **options)
        except UserError as error:
            if exporting or recipe.export.layout is not None:
                raise
            say(f"warning: such heads can be trained and measured, but not exported: {error}")
        else:
            layout = find_layout(options["layout"], recipe.method)
            rules = layout.blocking_rules(files, target, head.served())
            blocked = {engine: f"{rule.why} ({rule.what}); {rule.instead}" for engine, rule in rules.items()}
            found = [engines_notice(layout, recipe.target.path, target.identity.architectures, blocked)]
            found += [version_notice(layout, version) for version in (recipe.export.engine_version,) if version]
            for notice in filter(None, found):
                say(f"warning: {notice}")
    return head
