"""What would make a run shorter: one key of its recipe at a time, and the hours that this saves by the plan's own formulas."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.estimate.estimate import readable_time, total_seconds
from draftsmith.estimate.figures import Estimate
from draftsmith.recipe.schema import Recipe

LEAST_SHARE, MOST_LINES = 0.05, 5
_FEW_PROMPTS = 10
"""Prompts of a slice that still tell something."""


@dataclass(frozen=True)
class Change:
    """Another value for a key of the recipe, such as "train.epochs"."""

    key: str
    value: Any

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe with it."""
        section, name = self.key.split(".")
        return replace(recipe, **{section: replace(getattr(recipe, section), **{name: self.value})})

    def old(self, recipe: Recipe) -> Any:
        """Return the value that the recipe has."""
        section, name = self.key.split(".")
        return getattr(getattr(recipe, section), name)


def shorter(estimate: Estimate, estimate_of: Callable[[Recipe], Estimate]) -> list[str]:
    """Return lines that name a key, its value and a smaller one, and what that saves, the most first: at least LEAST_SHARE of the
    whole, at most MOST_LINES.

    estimate_of: estimates another recipe on the same device.
    """
    whole = total_seconds(estimate)
    saved = [
        (whole - total_seconds(estimate_of(change.apply(estimate.recipe))), change) for change in _changes(estimate)
    ]
    saved = sorted((one for one in saved if one[0] >= LEAST_SHARE * whole), key=lambda one: -one[0])
    return [
        f"shorter by {readable_time(seconds)} ({seconds / whole:.0%}): {change.key} {json.dumps(change.old(estimate.recipe))} -> "
        f"{json.dumps(change.value)}"
        for seconds, change in saved[:MOST_LINES]
    ]


def _changes(estimate: Estimate) -> Iterator[Change]:
    """Yield what could be done with less: half, the least, or none of it."""
    recipe = estimate.recipe
    spec, prompts = recipe.evaluate, max(estimate.prompts.values())
    if estimate.samples // 2 > recipe.data.heldout:
        yield Change("data.limit", estimate.samples // 2)
    if recipe.answers.regenerate and recipe.answers.max_new_tokens >= 4:
        yield Change("answers.max_new_tokens", recipe.answers.max_new_tokens // 2)
    if recipe.features.source == "online" and recipe.train.epochs > 1:
        yield Change("features.source", "store")
    if recipe.train.epochs > 1:
        yield Change("train.epochs", recipe.train.epochs // 2)
    if spec.repeats > 1:
        yield Change("evaluate.repeats", 1)
    if prompts > _FEW_PROMPTS:
        yield Change("evaluate.per_slice", max(_FEW_PROMPTS, prompts // 4))
    if spec.max_new_tokens >= 4:
        yield Change("evaluate.max_new_tokens", spec.max_new_tokens // 2)
    if len(spec.temperatures) > 1:
        yield Change("evaluate.temperatures", spec.temperatures[:1])
    if len(spec.plan_batches) > 1:
        yield Change("evaluate.plan_batches", [spec.batch])
    if spec.lossless and recipe.target.dtype != "float32":
        yield Change("evaluate.dtype", "float32")
    if spec.generate:
        yield Change("evaluate.generate", False)
