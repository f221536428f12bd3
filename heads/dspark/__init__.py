"""DSpark: a block in one pass, with a Markov bias and a confidence."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:DSparkOptions",
    drafter="drafter:DSparkDrafter",
    formats="formats",
)
