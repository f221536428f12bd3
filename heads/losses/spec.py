"""The section `train.loss` of a recipe: which losses a head is trained with, and their weights. head_loss.py computes them."""

from dataclasses import dataclass, field
from math import inf, pi, sin
from typing import TYPE_CHECKING, Literal

from draftsmith.errors import UserError
from draftsmith.fields import LATER, SHARE, VOCABULARY, check_fields, require, shown, within
from draftsmith.heads.losses.divergences import LOSSES

if TYPE_CHECKING:
    from draftsmith.heads.base import DraftHead

    LossKind = str
else:
    LossKind = Literal[tuple(LOSSES)]
SlotWeights = Literal["decay", "dpace", "dpace_confidence", "dpace_continuation"]
Normalize = Literal["rows", "weights", "sequence", "positions"]
SelectorLabels = Literal["teacher", "data"]
TunedKind = Literal["kl", "hard_ce"]
_WEIGHT = within(0, 10**6)
WEIGHT_WITH_FEATURES = 0.1
"""Weight of the loss of logits beside a loss of features, as in EAGLE-1."""
WEIGHT_WITH_TUNED = 0.2
"""Weight of the loss of logits beside a loss of the tuned target, as in Medusa-2."""


@dataclass(frozen=True)
class LossSpec:
    """How draft logits are compared with the target's distribution. A loss's own numbers are fields of the names that its
    entry in LOSSES gives."""

    kind: LossKind = "kl"
    """The loss of the logits; `--help` lists those of LOSSES, see `describe_kinds`."""
    decay: float = field(default=0.8, metadata=within(0, 1, above=True))
    """Step k weighs decay**k."""
    depth_weights: list[float] | None = field(default=None, metadata=LATER | _WEIGHT)
    """The weight of each step (or head), in place of decay; null: by decay."""
    slot_weights: SlotWeights = field(default="decay", metadata=LATER)
    """What weighs the slots of a block: decay; or D-PACE, how much a slot adds to the accepted length by the draft's own
    probabilities: dpace, or one of its two factors, dpace_confidence (that the draft gets as far) and dpace_continuation
    (how much further it gets)."""
    dpace_alpha: float = field(default=0.5, metadata=LATER | within(0, 1, above=True))
    """D-PACE: what a slot's probability is smoothed towards 1 by; near 0 late slots learn little, at 1 weights fall along a line."""
    temperature: float = field(default=1.0, metadata=LATER | within(0, 10, above=True))
    """kl: what both distributions are softened by (JetSpec)."""
    beta: float = field(
        default=0.5, metadata=LATER | within(0, 1, "kl and reverse_kl are its ends", above=True, below=True)
    )
    """jsd: weight of the target's distribution in the mixture; near 0 the loss is beta * kl, near 1 (1 - beta) * reverse_kl."""
    lk_scale: float = field(default=1.0, metadata=SHARE)
    """lk_hybrid: weight of the KL term at acceptance 0."""
    lk_decay: float = field(default=3.0, metadata=within(0, 1000))
    """lk_hybrid: how fast that weight falls as acceptance grows."""
    weight: float | None = field(default=None, metadata=LATER | _WEIGHT)
    """Weight of the loss that `kind` names; null: 1, 0.1 beside a feature loss (EAGLE-1), 0.2 beside a loss of the tuned
    target (Medusa-2)."""
    feature_weight: float | None = field(default=None, metadata=LATER | _WEIGHT)
    """Weight of the smooth L1 distance between a head's output and the target's state that it stands for; null: 1 for
    heads that have such an output (EAGLE-1), 0 for others."""
    top_k_weight: float = field(default=0.0, metadata=LATER | _WEIGHT)
    """Weight of the cross-entropy on the target's top_k most likely tokens alone (HASS: 1)."""
    top_k: int = field(default=10, metadata=LATER | VOCABULARY)
    """How many tokens top_k_weight is about."""
    also: dict[LossKind, float] = field(default_factory=dict, metadata=LATER | _WEIGHT)
    """Further losses of the logits and their weights, beside that of `kind` (DSpark: kind tv, weight 1.8, also hard_ce
    0.1)."""
    confidence_weight: float | None = field(default=None, metadata=LATER | _WEIGHT)
    """Weight of the cross-entropy between a head's confidence and the acceptance rate that its logits give; null: 1 for
    heads that have such an output (DSpark), 0 for others."""
    selector_weight: float | None = field(default=None, metadata=LATER | _WEIGHT)
    """Weight of the cross-entropy among the candidates of a head that chooses among a slot's likeliest tokens; null: 1 for
    heads that do (DFlash2), 0 for others."""
    selector_labels: SelectorLabels = field(default="teacher", metadata=LATER)
    """Which token is to be chosen: teacher, the target's likeliest; data, the text's own."""
    base_weight: float | None = field(default=None, metadata=LATER | SHARE)
    """Weight, at the start of the training, of the loss of a head's logits before their correction, while that of the corrected ones has
    the rest of 1 (Domino) or 1 (XPress); null: 1 for Domino, 0.6 for XPress, 0 for heads without such logits."""
    base_share: float | None = field(default=None, metadata=LATER | within(0, 1, "a share of the training"))
    """Share of the training over which that weight falls to 0, along a line; null: 0.5 for Domino, it stays for XPress."""
    rounds_weight: float | None = field(default=None, metadata=LATER | _WEIGHT)
    """Weight of the mean loss of the rounds in which a head reads its own guesses; null: 0.3 for heads with such rounds
    (XPress), 0 for others."""
    tuned_kind: TunedKind = field(default="kl", metadata=LATER)
    """What a target that is tuned with the head (Medusa-2) learns: kl, the original's own distribution, so that it changes as
    little as it can (self-distillation); hard_ce, the text."""
    tuned_weight: float | None = field(default=None, metadata=LATER | _WEIGHT)
    """Weight of that loss; null: 1 for heads that tune the target, 0 for others."""
    ramp: float = field(default=0.0, metadata=LATER | within(0, 1, "a share of the training"))
    """Share of the training over which all losses of the draft rise from nothing, along a sine, while the tuned target's
    count in full from the start; 0 leaves that out."""
    normalize: Normalize = "rows"
    """The mean that the loss is: over rows supervised at step 0; over all steps' rows by the steps' weights (block
    drafters); over documents of their own mean over rows; or over all B*L positions, padding included (SpecForge)."""

    def __post_init__(self) -> None:
        check_fields(self, "train.loss.")
        require(self.kind in LOSSES, "train.loss.kind", self.kind, f"choose one of {', '.join(LOSSES)}")
        if unknown := sorted(set(self.also) - set(LOSSES)):
            raise UserError(f"train.loss.also names {shown(unknown[0])}: choose among {', '.join(LOSSES)}.")
        for key in {key: None for loss in LOSSES.values() for key in loss.parameters}:
            owners = [loss.name for loss in LOSSES.values() if key in loss.parameters]
            why = f"it belongs to {' and '.join(owners)}, and train.loss.kind is {self.kind}: leave it out"
            self._refuse(key, {self.kind, *self.also}.isdisjoint(owners), why)
        self._check_dpace()
        weighed = "train.loss.depth_weights name the weight of every step: leave one of them out"
        self._refuse("decay", self.depth_weights is not None, weighed)
        self._refuse("top_k", not self.top_k_weight, "train.loss.top_k_weight is 0: set that, or leave top_k out")
        weights = self.depth_weights
        require(weights is None or sum(weights) > 0, "train.loss.depth_weights", weights, "one number must be above 0")

    def _refuse(self, key: str, needless: bool, why: str) -> None:
        """Raise UserError where a field is not at its default, though `needless`."""
        if needless and getattr(self, key) != getattr(type(self), key):
            raise UserError(f"train.loss.{key} is {getattr(self, key)}, but {why}.")

    @property
    def dpace(self) -> bool:
        """Whether D-PACE weighs the slots, by probabilities that a pass has to tell first."""
        return self.slot_weights != "decay"

    @property
    def divided_later(self) -> bool:
        """Whether the sum is divided by weights that the passes of a step tell, see `LossOutput.weights`."""
        return self.dpace and self.normalize == "weights"

    def _check_dpace(self) -> None:
        """Raise UserError where D-PACE would be beside another weight, or where a loss does not tell the probability of a token."""
        if not self.dpace:
            self._refuse("dpace_alpha", True, "train.loss.slot_weights is decay: set dpace there, or leave it out")
            return
        named = [loss.name for loss in LOSSES.values() if loss.label]
        if self.kind not in named:
            raise UserError(
                f"train.loss.slot_weights is {self.slot_weights}, which weighs slots by the probability of one token, but "
                f"train.loss.kind is {self.kind}, which is no cross-entropy with one: choose {' or '.join(named)}."
            )
        for key in ("decay", "depth_weights"):
            self._refuse(
                key, True, f"train.loss.slot_weights is {self.slot_weights}, which replaces it: leave one of them out"
            )

    def check_head(self, head: "DraftHead") -> None:
        """Raise UserError where the losses need what `head` does not have."""
        trains, heads = head.trains, f"{head.method} heads of this recipe"
        confident, tunes_target = ("confidence" in trains.outputs), ("tuned" in trains.outputs)
        self.check_steps(trains.steps)
        blocks = "learn no block of slots that are drafted at once: leave it out, or train dflash"
        self._refuse("slot_weights", not trains.blocks, f"{heads} {blocks}")
        self._refuse("decay", trains.steps == 1 and self.decay != 1, f"{heads} learn a single step: leave it out")
        terms = [
            *self.term_weights("feature" in trains.outputs, tunes_target),
            *self.also.values(),
            self.top_k_weight,
        ]
        # Losses that only some heads have; null where they count in full.
        parts = [self.confidence_weight] * confident + [self.tuned_weight] * tunes_target
        parts += [self.selector_weight] * ("selector" in trains.outputs)
        if not any(terms) and all(weight == 0 for weight in parts):
            raise UserError(
                "train.loss.weight is 0 and no other loss has a weight, so nothing would be learned: raise one."
            )
        if self.confidence_weight == 0 and confident:
            raise UserError(
                "train.loss.confidence_weight is 0, which leaves the confidence untrained: set head.confidence_head to false, "
                "or a weight."
            )
        # A weight of 0 asks for nothing that a head may lack.
        silent = not confident and self.confidence_weight != 0
        self._refuse("confidence_weight", silent, f"{heads} say no confidence: leave it out")
        choosing = "selector" in trains.outputs
        for key in ("selector_weight", "selector_labels"):
            self._refuse(
                key, not choosing and self.selector_weight != 0, f"{heads} choose among no candidates: leave it out"
            )
        based = "base" in trains.outputs
        why = f"{heads} correct no logits: leave it out, or train domino or xpress"
        self._refuse("base_weight", not based and self.base_weight != 0, why)
        why = why if not based else "train.loss.base_weight is 0, so that nothing falls: leave it out"
        self._refuse("base_share", not based or self.base_weight == 0, why)
        twice = "prefix" in trains.outputs and self.dpace
        why = "train.loss.slot_weights: decay weighs anew what is behind a shown prefix, so set that, or leave head.variable_prefix out"
        self._refuse("slot_weights", twice, why)
        guesses = f"{heads} read no guesses of their own: leave it out, or train xpress with head.free_rounds"
        self._refuse("rounds_weight", "rounds" not in trains.outputs and self.rounds_weight != 0, guesses)
        why = f"{head.method} heads leave the target as it is: leave it out, or train medusa2"
        for key in ("tuned_kind", "tuned_weight", "ramp"):
            self._refuse(key, not tunes_target and getattr(self, key) != 0, why)

    def term_weights(self, features: bool, tuned: bool = False) -> tuple[float, float]:
        """Return the weights of the loss of logits and of features, of a head that has `features` or has not, and tunes
        the target or does not.

        Raises UserError for a weight on features that are not there.
        """
        why = "no output of the head stands for a state of the target: leave it out, or train EAGLE-1"
        self._refuse("feature_weight", not features and self.feature_weight != 0, why)
        feature_weight = float(features) if self.feature_weight is None else self.feature_weight
        usual = WEIGHT_WITH_FEATURES if feature_weight else WEIGHT_WITH_TUNED if tuned else 1.0
        return usual if self.weight is None else self.weight, feature_weight

    def warmup_weight(self, progress: float) -> float:
        """Return what the losses of the draft are multiplied by at `progress` (0 to 1) of the training.

        It rises from 0 to 1 along a sine over `ramp`, so that new heads do not disturb the target (Cai et al. 2024, section
        2.3.2).
        """
        return 1.0 if progress >= self.ramp else sin(pi / 2 * progress / self.ramp)

    def besides(self, progress: float, rounds: int) -> tuple[float, ...]:
        """Return, for heads that correct logits, the weights of the loss of the corrected ones, of those before, and of each of `rounds` rounds
        of guesses, if the head has such, at `progress` (0 to 1)."""
        start, share = 1.0 if rounds == 0 else 0.6, self.base_until(rounds)
        start = start if self.base_weight is None else self.base_weight
        base = 0.0 if progress >= share else start * (1 - progress / share)
        if rounds == 0:
            return 1.0 - base, base
        each = (0.3 if self.rounds_weight is None else self.rounds_weight) / rounds
        return 1.0, base, *[each] * rounds

    def base_until(self, rounds: int) -> float:
        """Return the share of the training after which the logits before their correction have no loss, infinity for never."""
        return (0.5 if rounds == 0 else inf) if self.base_share is None else self.base_share

    def check_steps(self, steps: int) -> None:
        """Raise UserError where the weights are not those of a head that is trained on `steps` steps (or heads)."""
        if self.depth_weights is not None and len(self.depth_weights) != steps:
            raise UserError(
                f"train.loss.depth_weights has {len(self.depth_weights)} numbers, but the head is trained on {steps} steps: give "
                "one number for each."
            )

    def step_weight(self, offset: int) -> float:
        """Return the weight of step (or head) number `offset`; 1 with D-PACE, whose weights differ from row to row."""
        if self.dpace:
            return 1.0
        return self.decay**offset if self.depth_weights is None else self.depth_weights[offset]


def describe_kinds() -> str:
    """Return the help of `train.loss.kind`: one sentence per loss."""
    return "; ".join(f"{loss.name}: {loss.summary}" for loss in LOSSES.values()) + "."
