"""The drafters of the comparison (`python -m scripts.bench.drafters`), one line each."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from draftsmith.heads.registry import method_names

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Subject:
    """A drafter of the comparison.

    name: as the tables and the result file call it. recipe: of its training, relative to the repository, "" for a drafter
    that another package trains. factors: what the recipe's learning rates are multiplied with, a run each. overrides: of the
    recipe, as on the command line. rates: the learning rates of a drafter that another package trains, a run each. first: the
    recipe of a first stage whose heads the training starts from; the stages share the budget.
    """

    name: str
    recipe: str = ""
    factors: tuple[float, ...] = (1.0,)
    overrides: tuple[str, ...] = ()
    rates: tuple[float, ...] = field(default=())
    first: str = ""

    @property
    def run_names(self) -> tuple[str, ...]:
        """The names of its runs, which are those of their folders."""
        if self.recipe:
            return tuple(f"{self.name}-lr{factor:g}" for factor in self.factors)
        return tuple(f"{self.name}-{rate:g}" for rate in self.rates)

    def narrowed(self, names: Collection[str]) -> "Subject | None":
        """Return the drafter with the runs that `names` ask for: all where it has the drafter's own; None where none is."""
        kept = [self.name in names or run in names for run in self.run_names]
        if not any(kept):
            return None
        values = self.factors if self.recipe else self.rates
        fewer = tuple(value for value, keep in zip(values, kept, strict=True) if keep)
        return replace(self, factors=fewer) if self.recipe else replace(self, rates=fewer)

    @property
    def first_stage(self) -> "Subject | None":
        """The first stage as a drafter of its own, None where there is but one."""
        return Subject(f"{self.name}-first", self.first) if self.first else None

    def present(self, root: Path = ROOT) -> bool:
        """Whether its recipe and its method are there (what another package trains always is)."""
        path = root / self.recipe
        if not self.recipe:
            return True
        return path.is_file() and yaml.safe_load(path.read_text(encoding="utf-8"))["method"] in method_names()


SUBJECTS = (
    Subject("eagle3", "recipes/eagle3/shared-target.yaml", factors=(0.5, 1.0, 2.0)),
    Subject(
        "eagle3-whole-vocab",
        "recipes/eagle3/shared-target.yaml",
        factors=(0.5,),
        overrides=("--head.draft_vocab_size=null",),
    ),
    Subject(
        # Our trainer with these of speculators' defaults: the norms, the frozen projection, equal weights of the steps, weight
        # decay and a rate that ends at zero. Warmup, the curve of the rate, AdamW's and Muon's own settings are ours.
        "eagle3-as-speculators",
        "recipes/eagle3/shared-target.yaml",
        factors=(1.0,),
        overrides=(
            "--head.norm_before_fc=true",
            "--head.norm_output=true",
            "--head.train_lm_head=false",
            "--train.loss.decay=1.0",
            "--train.weight_decay=0.1",
            "--train.final_lr=0",
        ),
    ),
    Subject("speculators-eagle3", rates=(0.003, 0.01, 0.03)),
    Subject("eagle3.1", "recipes/eagle3/eagle3.1-shared-target.yaml"),
    Subject("peagle", "recipes/peagle/shared-target.yaml"),
    Subject("eagle1", "recipes/eagle1/shared-target.yaml"),
    Subject("hass", "recipes/eagle1/hass-shared-target.yaml"),
    Subject("medusa", "recipes/medusa/shared-target.yaml"),
    Subject("medusa2", "recipes/medusa2/shared-target.yaml", first="recipes/medusa/shared-target.yaml"),
    Subject("hydra", "recipes/hydra/shared-target.yaml"),
    Subject("hydra++", "recipes/hydra/plus-shared-target.yaml"),
    Subject("dflash", "recipes/dflash/shared-target.yaml"),
    Subject("dspark", "recipes/dspark/shared-target.yaml"),
    Subject("draft_model", "recipes/draft_model/shared-target.yaml"),
)
"""The first is what the others are held against."""
