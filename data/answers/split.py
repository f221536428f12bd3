"""Which answers are held out of training."""

from draftsmith.errors import UserError
from draftsmith.files import fingerprint


def split_heldout(conversations: list[str], count: int) -> tuple[list[int], list[int]]:
    """Split samples into (train, held out), about `count` of them, the same for every run over the same data.

    conversations: the id of each sample's. Turns of one stay together: a later turn's prompt holds the earlier answers.
    """
    if count >= len(conversations):
        raise UserError(
            f"data.heldout is {count} but there are only {len(conversations)} answers: lower it or add data."
        )
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(conversations):
        groups.setdefault(name, []).append(place)
    heldout: list[int] = []
    for name in sorted(groups, key=fingerprint):
        if len(heldout) >= count:
            break
        heldout += groups[name]
    if len(heldout) == len(conversations):
        raise UserError("data.heldout takes every conversation: lower it or add data.")
    return sorted(set(range(len(conversations))) - set(heldout)), sorted(heldout)
