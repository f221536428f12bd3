"""Medusa-2: Medusa heads with a target that is tuned with them."""

from draftsmith.heads.registry import Method

METHOD = Method(
    __name__,
    options="options:Medusa2Options",
    drafter="draftsmith.heads.medusa.drafter:MedusaDrafter",
    trees=frozenset({"static", "drawn"}),
    served_as="medusa",
    launcher="medusa.py",
)
