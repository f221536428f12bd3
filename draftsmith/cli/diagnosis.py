"""`draftsmith doctor`: this machine, or a head and a target. The first works where torch and transformers do not."""

from argparse import Namespace

from draftsmith.cli.doctor import run_doctor
from draftsmith.errors import UserError


def diagnose(own: Namespace, words: list[str]) -> int:
    """Carry out `draftsmith doctor`: check this machine, or with --head and --target whether they belong together."""
    if words:
        raise UserError(f"doctor takes --head and --target, or no options to check this machine, but not {words[0]}.")
    if own.head is None and own.target is None:
        return run_doctor()
    if own.head is None or own.target is None:
        lost = "--target" if own.head else "--head"
        raise UserError(
            f"doctor compares a head with a target, but {lost} is missing: give --head FOLDER --target PATH."
        )
    from draftsmith.cli.compatibility import run_fit

    return run_fit(own.head, own.target)
