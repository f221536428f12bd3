"""`draftsmith plan`: the words of the command line, and the text it prints."""

from dataclasses import replace

from draftsmith.cli.arguments import require_recipe, take
from draftsmith.errors import UserError
from draftsmith.plan.devices import find_device
from draftsmith.plan.plan import assume, comment, count_conversations, describe, make_plan, target_shape


def plan_command(words: list[str]) -> str:
    """The text of `draftsmith plan WORDS`."""
    from draftsmith.recipe.parse import parse_recipe

    as_comment = bool(take(words, "--comment", flag=True))
    device = find_device((take(words, "--device") or ["h100"])[-1])
    options = {name: take(words, name) for name in ("--gpus", "--utilisation", "--prompt-tokens", "--answer-tokens")}
    require_recipe(words, "plan", "recipes/eagle3/qwen3-8b.yaml")
    recipe = parse_recipe(words, "draftsmith plan")
    target = target_shape(recipe)
    given = assume(recipe, target, device)
    read = {name: _number(name, values[-1]) for name, values in options.items() if values}
    given = replace(
        given,
        gpus=int(read.get("--gpus", given.gpus)),
        utilisation=read.get("--utilisation", given.utilisation),
        prompt=int(read.get("--prompt-tokens", given.prompt)),
        answer=int(read.get("--answer-tokens", given.answer)),
    )
    count = count_conversations(recipe)
    if recipe.data.heldout >= count:
        raise UserError(
            f"data.heldout is {recipe.data.heldout} but there are only {count} conversations: lower it or add data."
        )
    plan = make_plan(recipe, target, count, given)
    if as_comment:
        return comment(plan)
    note = "head: sizes that the recipe leaves null count as the target's; those of train.warm_start are not read"
    return "\n".join([f"plan of {recipe.name}", *describe(plan), *([note] if recipe.train.warm_start else [])])


def _number(name: str, text: str) -> float:
    """Read a positive number; a share for --utilisation, an integer for the others."""
    try:
        value: float = float(text) if name == "--utilisation" else int(text)
    except ValueError:
        value = 0
    if not 0 < value <= (1 if name == "--utilisation" else 10**9):
        kind = "a share above 0 and at most 1" if name == "--utilisation" else "a number of at least 1"
        raise UserError(f"{name} is {text!r}: give {kind}.")
    return value
