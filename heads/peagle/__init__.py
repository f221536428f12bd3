"""P-EAGLE: EAGLE-3 that drafts all tokens in one pass."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:PEagleOptions",
    drafter="drafter:PEagleDrafter",
    formats="formats",
    trees=frozenset({"static", "drawn"}),
)
