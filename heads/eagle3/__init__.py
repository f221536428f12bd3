"""EAGLE-3 (Li et al. 2025)."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:Eagle3Options",
    drafter="draftsmith.heads.eagle.drafter:EagleDrafter",
    formats="formats",
    trees=frozenset({"static", "drawn", "dynamic"}),
    launcher="eagle.py",
)
