"""Plans of a recipe and of its variants on one device, which is of the table, or this machine, measured once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.errors import UserError
from draftsmith.estimate.counting import HeadCost
from draftsmith.estimate.estimate import (
    assume,
    check_template,
    count_prompts,
    lengths_at_hand,
    local_conversations,
    make_estimate,
    read_target,
)
from draftsmith.estimate.figures import Device, Estimate, PlannedTarget
from draftsmith.estimate.rates import measure_device
from draftsmith.recipe.schema import Recipe


@dataclass(frozen=True)
class Estimator:
    """What plans are made of. samples: conversations at hand; prompts: of the evaluation, by slice. asked: fields of Assumptions that
    the user gave, or that the data tell. head: its costs, once they are counted."""

    target: PlannedTarget
    device: Device
    samples: int
    prompts: Mapping[str, int]
    asked: Mapping[str, Any]
    head: HeadCost | None = None

    @classmethod
    def of(cls, recipe: Recipe, device: Device, asked: Mapping[str, Any]) -> "Estimator":
        """Read the target's config, count what is at hand, and measure a device that is not of the table.

        Raises UserError for a recipe that cannot be planned, before anything is measured, and for assumptions about GPUs where this
        machine is measured.
        """
        check_template(recipe)
        target, conversations = read_target(recipe), local_conversations(recipe)
        samples = recipe.data.limit if conversations is None else len(conversations)
        if samples is None:
            raise UserError(
                "data.limit is null and the data are not local files, so nobody knows how many conversations there are: add "
                "--data.limit N."
            )
        if recipe.data.heldout >= samples:
            raise UserError(
                f"data.heldout is {recipe.data.heldout} but there are only {samples} conversations: lower it or add data."
            )
        if not {"prompt", "answer"} <= asked.keys():
            asked = lengths_at_hand(recipe, target.shape, conversations) | {**asked}
        found = cls(target, device, samples, count_prompts(recipe), asked)
        estimate = found.estimate(recipe)
        found = replace(found, head=estimate.head)
        if not device.measured:
            return found
        if option := next((name for name in ("gpus", "utilisation") if name in asked), None):
            raise UserError(
                f"--{option} is {asked[option]:g}, but this machine is measured as it is: leave --{option} out, or name GPUs of the "
                "table with --device."
            )
        return replace(found, device=measure_device(recipe, target, estimate))

    def estimate(self, recipe: Recipe) -> Estimate:
        """Return the plan of the recipe, or of one that asks for less."""
        given = replace(assume(recipe, self.target.shape, self.device), **self.asked)
        if recipe.answers.regenerate:
            given = replace(given, answer=min(given.answer, recipe.answers.max_new_tokens))
        samples, most = min(self.samples, recipe.data.limit or self.samples), recipe.evaluate.per_slice
        prompts = {name: min(count, most or count) for name, count in self.prompts.items()}
        return make_estimate(recipe, self.target.shape, samples, given, prompts, self.head)
