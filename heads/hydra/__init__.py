"""Hydra and Hydra++ (Ankner et al. 2024)."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:HydraOptions",
    drafter="drafter:HydraDrafter",
    formats="formats",
    trees=frozenset({"static", "drawn"}),
)
