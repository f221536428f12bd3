"""A draft model: a small Llama, distilled from the target."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:DraftLmOptions",
    drafter="drafter:DraftLmDrafter",
    formats="formats",
)
