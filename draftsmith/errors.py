"""The exception that stands for a user's mistake, and the one that stands for Ctrl-C."""


class UserError(ValueError):
    """A mistake that the user can fix, said in one sentence: what, where, why, and how to fix it.

    The command line prints the sentence alone and exits with code 2; any other exception is a bug
    and keeps its traceback.
    """


class StoppedError(UserError):
    """Work that stopped because the user asked for it, and that the same command goes on with: exit code 130."""
