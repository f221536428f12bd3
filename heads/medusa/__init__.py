"""Medusa (Cai et al. 2024)."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:MedusaOptions",
    drafter="drafter:MedusaDrafter",
    formats="formats",
    trees=frozenset({"static", "drawn"}),
    launcher="medusa.py",
)
