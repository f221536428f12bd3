"""EAGLE-1 (Li et al. 2024) and HASS."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:Eagle1Options",
    drafter="draftsmith.heads.eagle.drafter:EagleDrafter",
    formats="formats",
    trees=frozenset({"static", "drawn", "dynamic"}),
    launcher="eagle.py",
)
