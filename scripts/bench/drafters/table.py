"""List the drafters of the comparison (`python -m scripts.bench.drafters`), one entry each."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class ComparedDrafter:
    """A drafter of the comparison.

    name: in the tables and of the result file. recipe: of its training, relative to the repository, "" for a drafter
    that another package trains. factors: what the recipe's learning rates are multiplied with, a run each. overrides: of the
    recipe, as on the command line. rates: the learning rates of a drafter that another package trains, a run each. first: the
    recipe of a first stage whose heads the training starts from; the stages share the budget.
    """

    name: str
    recipe: str = ""
    factors: tuple[float, ...] = (1.0,)
    overrides: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    first: str = ""

    @property
    def run_names(self) -> tuple[str, ...]:
        """The names of its runs, which are those of their folders."""
        if self.recipe:
            return tuple(f"{self.name}-lr{factor:g}" for factor in self.factors)
        return tuple(f"{self.name}-{rate:g}" for rate in self.rates)

    def narrowed(self, names: Collection[str]) -> "ComparedDrafter | None":
        """Return the drafter with the runs that `names` ask for: all where it has the drafter's own; None where none is."""
        kept = [self.name in names or run in names for run in self.run_names]
        if not any(kept):
            return None
        values = self.factors if self.recipe else self.rates
        fewer = tuple(value for value, keep in zip(values, kept, strict=True) if keep)
        return replace(self, factors=fewer) if self.recipe else replace(self, rates=fewer)


_EAGLE3 = "recipes/eagle3/shared-target.yaml"
DRAFTERS = (
    ComparedDrafter("eagle3", _EAGLE3, factors=(0.5, 1.0, 2.0)),
    ComparedDrafter("eagle3-whole-vocab", _EAGLE3, factors=(0.5,), overrides=("--head.draft_vocab_size=null",)),
    ComparedDrafter(
        # Our trainer with these of speculators' defaults: the norms, the frozen projection, equal weights of the steps, weight
        # decay and a rate that ends at zero. Warmup, the curve of the rate, AdamW's and Muon's own settings are ours.
        "eagle3-as-speculators",
        _EAGLE3,
        overrides=(
            *("--head.norm_before_fc=true", "--head.norm_output=true", "--head.train_lm_head=false"),
            *("--train.loss.decay=1.0", "--train.weight_decay=0.1", "--train.final_lr=0"),
        ),
    ),
    ComparedDrafter("speculators-eagle3", rates=(0.003, 0.01, 0.03)),
    ComparedDrafter("eagle3.1", "recipes/eagle3/eagle3.1-shared-target.yaml"),
    ComparedDrafter("peagle", "recipes/peagle/shared-target.yaml"),
    ComparedDrafter("eagle1", "recipes/eagle1/shared-target.yaml"),
    ComparedDrafter("hass", "recipes/eagle1/hass-shared-target.yaml"),
    ComparedDrafter("medusa", "recipes/medusa/shared-target.yaml"),
    ComparedDrafter("medusa2", "recipes/medusa2/shared-target.yaml", first="recipes/medusa/shared-target.yaml"),
    ComparedDrafter("hydra", "recipes/hydra/shared-target.yaml"),
    ComparedDrafter("hydra++", "recipes/hydra/plus-shared-target.yaml"),
    ComparedDrafter("dflash", "recipes/dflash/shared-target.yaml"),
    ComparedDrafter("dspark", "recipes/dspark/shared-target.yaml"),
    ComparedDrafter("draft_model", "recipes/draft_model/shared-target.yaml"),
)
"""The others are compared with the first."""
