"""The prompts of an evaluation: conversations of the recipe's files, and the requests that they become."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from draftsmith.data.conversations.load import Conversation, load_conversations
from draftsmith.data.conversations.templates import prepare_prompts
from draftsmith.decoder.answers import Request
from draftsmith.decoder.sampling import row_key
from draftsmith.errors import UserError
from draftsmith.eval.report.page_model import OVERALL
from draftsmith.recipe.evaluate import EvaluateSpec
from draftsmith.recipe.schema import Recipe
from draftsmith.storage import fingerprint


@dataclass(frozen=True)
class Prompts:
    """The prompts of an evaluation. conversations: those that the requests begin, by id. seed: of the answers' random numbers."""

    requests: Sequence[Request]
    conversations: Mapping[str, Conversation]
    seed: int

    @property
    def longest_text(self) -> int:
        """The most tokens that a prompt and its answer have together."""
        return max((len(r.prompt_ids) + r.max_new_tokens for r in self.requests), default=0)

    @cached_property
    def median(self) -> Request:
        """The request whose prompt is of median length."""
        return sorted(self.requests, key=lambda r: len(r.prompt_ids))[len(self.requests) // 2]

    def repeat(self, number: int) -> list[Request]:
        """Return the requests with random keys of their own for a repeat: greedy answers are the same, sampled ones differ."""
        return [replace(r, key=row_key(self.seed, "evaluate", number, r.sample_id)) for r in self.requests]

    def digest(self, spec: EvaluateSpec) -> str:
        """Identify the prompts as they were given, so that it stays the same where a new target reads them as other tokens."""
        chosen, limits = [self.conversations[r.sample_id] for r in self.requests], spec.max_new_tokens_by_slice
        return fingerprint(
            [(c.id, c.slice, c.prompt(), c.tools, limits.get(c.slice, spec.max_new_tokens)) for c in chosen]
        )

    @property
    def inputs(self) -> dict[str, str]:
        """What a result depends on: the prompts as the target reads them, and their references where any has one."""
        prompts = fingerprint([(r.sample_id, r.slice, r.prompt_ids, r.max_new_tokens) for r in self.requests])
        references = {name: c.reference for name, c in self.conversations.items() if c.reference is not None}
        return {"prompts": prompts} | ({"references": fingerprint(references)} if references else {})


def read_conversations(spec: EvaluateSpec, files: Sequence[str], template: Mapping[str, Any]) -> list[Conversation]:
    """Return the conversations of prompt files, `per_slice` of each slice. template: see `load_conversations`. Raises UserError for slices that have no such name."""
    chosen: list[Conversation] = []
    seen: Counter[str] = Counter()
    for conversation in load_conversations(files, split=spec.split, template=template):
        if conversation.slice == OVERALL:
            raise UserError(
                f"evaluate.prompts: the prompt {conversation.id} is in a slice named {OVERALL}, which is what all slices "
                "together are called: give the slice another name."
            )
        seen[conversation.slice] += 1
        if spec.per_slice is None or seen[conversation.slice] <= spec.per_slice:
            chosen.append(conversation)
    for key in ("max_new_tokens_by_slice", "example_slices"):
        if unknown := sorted(set(getattr(spec, key)) - set(seen)):
            raise UserError(
                f"evaluate.{key} names the slice {unknown[0]}, but the prompts have {', '.join(sorted(seen))}: correct the name."
            )
    return chosen


def make_prompts(
    recipe: Recipe, chosen: Sequence[Conversation], tokenizer: Any, context_length: int, warn: Callable[[str], None]
) -> Prompts:
    """Return conversations as requests to a target with so long a context; warns of prompts that are left out."""
    spec = recipe.evaluate
    deepest = max([spec.longest_chain, *(tree.depth for draft in spec.drafts if (tree := draft.load()) is not None)])
    prompts = prepare_prompts(
        tokenizer,
        chosen,
        max_new_tokens=lambda name: spec.max_new_tokens_by_slice.get(name, spec.max_new_tokens),
        max_length=context_length - deepest,
        template=recipe.data.template,
        limit=f"the target's context leaves after a draft of {deepest}: give shorter prompts, or lower evaluate.max_k",
        warn=warn,
    )
    if len(prompts) < len(chosen):
        warn(
            f"{len(chosen) - len(prompts)} of {len(chosen)} prompts are too long for the target and are left out: give shorter ones "
            "in evaluate.prompts, or lower evaluate.max_k."
        )
    seed = recipe.seed
    requests = [Request.seeded(p.conversation.id, p.conversation.slice, p.ids, p.max_new_tokens, seed) for p in prompts]
    return Prompts(requests, {c.id: c for c in chosen}, seed)
