"""The one exception that stands for a user's mistake."""


class UserError(ValueError):
    """A mistake that the user can fix, said in one sentence: what, where, why, and how to fix it.

    The command line prints the sentence alone and exits with code 2; any other exception is a bug
    and keeps its traceback.
    """
