"""How a recipe says what draft logits are judged by; losses.py does it."""

from dataclasses import asdict, dataclass, field
from math import inf, pi, sin
from typing import TYPE_CHECKING, Any, Literal, get_args

from draftsmith.errors import UserError
from draftsmith.fields import without_neutral

if TYPE_CHECKING:
    from draftsmith.heads.base import DraftHead

LossKind = Literal["kl", "reverse_kl", "jsd", "soft_ce", "tv", "lk_alpha", "lk_hybrid", "hard_ce"]
Normalize = Literal["rows", "weights", "sequence", "positions"]
TunedKind = Literal["kl", "hard_ce"]
BESIDE_FEATURES = 0.1
"""Weight of the loss of logits where features are learnt too, as in EAGLE-1."""
BESIDE_TUNED = 0.2
"""Weight of the loss of logits where the target is tuned too, as in Medusa-2."""


@dataclass(frozen=True)
class LossSpec:
    """How draft logits are compared with the target's distribution."""

    kind: LossKind = "kl"
    """kl: forward KL; reverse_kl: KL from the draft to the target; jsd: between the two, see beta; soft_ce: the gradient
    of kl without the entropy; tv: 1 - acceptance rate; lk_alpha: its logarithm; lk_hybrid: KL fading into tv as acceptance
    grows; hard_ce: cross-entropy with the text itself."""
    decay: float = 0.8
    """Step k weighs decay**k."""
    depth_weights: list[float] | None = None
    """The weight of each step (or head), in place of decay; null: by decay."""
    beta: float = 0.5
    """jsd: weight of the target's distribution in the mixture; near 0 the loss is beta * kl, near 1 (1 - beta) * reverse_kl."""
    lk_scale: float = 1.0
    """lk_hybrid: weight of the KL term at acceptance 0."""
    lk_decay: float = 3.0
    """lk_hybrid: how fast that weight falls as acceptance grows."""
    weight: float | None = None
    """Weight of the loss that `kind` names; null: 1, 0.1 beside a feature loss (EAGLE-1), 0.2 beside a loss of the tuned
    target (Medusa-2)."""
    feature_weight: float | None = None
    """Weight of the smooth L1 distance between a head's output and the target's state that it stands for; null: 1 for
    heads that have such an output (EAGLE-1), 0 for others."""
    top_k_weight: float = 0.0
    """Weight of the cross-entropy on the target's top_k most likely tokens alone (HASS: 1)."""
    top_k: int = 10
    """How many tokens top_k_weight is about."""
    also: dict[LossKind, float] = field(default_factory=dict)
    """Further losses of the logits and their weights, beside that of `kind` (DSpark: kind tv, weight 1.8, also hard_ce
    0.1)."""
    confidence_weight: float | None = None
    """Weight of the cross-entropy between a head's confidence and the acceptance rate that its logits give; null: 1 for
    heads that have such an output (DSpark), 0 for others."""
    tuned_kind: TunedKind = "kl"
    """What a target that is tuned with the head (Medusa-2) learns: kl, the original's own distribution, so that it changes as
    little as it can (self-distillation); hard_ce, the text."""
    tuned_weight: float | None = None
    """Weight of that loss; null: 1 for heads that tune the target, 0 for others."""
    ramp: float = 0.0
    """Share of the training over which all losses of the draft rise from nothing, along a sine, while the tuned target's
    count in full from the start; 0 leaves that out."""
    normalize: Normalize = "rows"
    """The mean that the loss is: over rows supervised at step 0; over all steps' rows by the steps' weights (block
    drafters); over documents of their own mean over rows; or over all B*L positions, padding included (SpecForge)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise UserError(f"train.loss.decay is {self.decay}: it must be above 0 and at most 1.")
        if not 0.0 < self.beta < 1.0:
            raise UserError(
                f"train.loss.beta is {self.beta}: it must be above 0 and below 1; kl and reverse_kl are its ends."
            )
        if not 0.0 <= self.lk_scale <= 1.0:
            raise UserError(f"train.loss.lk_scale is {self.lk_scale}: it is a share of the loss, from 0 to 1.")
        if not 0.0 <= self.lk_decay < inf:
            raise UserError(f"train.loss.lk_decay is {self.lk_decay}: it must not be negative.")
        self._check_unused()
        weights = self.depth_weights
        if weights is not None and not (sum(weights) > 0 and all(0 <= w < inf for w in weights)):
            raise UserError(
                f"train.loss.depth_weights is {weights}: give one number per step or head, none negative and not all of them 0."
            )
        weighed = {
            key: getattr(self, key)
            for key in ("weight", "feature_weight", "top_k_weight", "confidence_weight", "tuned_weight")
        }
        for key, value in (weighed | {f"also.{kind}": value for kind, value in self.also.items()}).items():
            if value is not None and not 0 <= value < inf:
                raise UserError(f"train.loss.{key} is {value}: it must not be negative.")
        if unknown := sorted(set(self.also) - set(get_args(LossKind))):
            raise UserError(f"train.loss.also names {unknown[0]!r}: choose among {', '.join(get_args(LossKind))}.")
        if self.top_k < 1:
            raise UserError(f"train.loss.top_k is {self.top_k}: it must be at least 1.")
        if not 0.0 <= self.ramp <= 1.0:
            raise UserError(f"train.loss.ramp is {self.ramp}: it is a share of the training, from 0 to 1.")

    def _check_unused(self) -> None:
        """Raise UserError for a number of a loss that is not taken."""
        taken = {self.kind, *self.also}
        for name, kind in (("beta", "jsd"), ("lk_scale", "lk_hybrid"), ("lk_decay", "lk_hybrid")):
            if kind not in taken and getattr(self, name) != getattr(type(self), name):
                raise UserError(
                    f"train.loss.{name} is {getattr(self, name)}, but it belongs to {kind}, and kind is {self.kind}: leave "
                    "it out."
                )
        if self.depth_weights is not None and self.decay != type(self).decay:
            raise UserError(
                f"train.loss.decay is {self.decay}, but depth_weights name the weight of every step: leave one of them out."
            )
        if self.top_k != type(self).top_k and not self.top_k_weight:
            raise UserError(f"train.loss.top_k is {self.top_k}, but top_k_weight is 0: set that, or leave top_k out.")

    def check_head(self, head: "DraftHead") -> None:
        """Raise UserError where the losses need what `head` does not have."""
        self.check_steps(head.train_steps)
        terms = [*self.term_weights(head.regresses, head.tunes), *self.also.values(), self.top_k_weight]
        terms += [1.0 if weight is None else weight for weight in self._of_parts(head)]
        if self.decay not in (type(self).decay, 1.0) and head.train_steps == 1:
            raise UserError(
                f"train.loss.decay is {self.decay}, but {head.method} heads of this recipe learn a single step: leave it out."
            )
        if not any(terms):
            raise UserError(
                "train.loss.weight is 0 and no other loss has a weight, so nothing would be learned: raise one."
            )
        if self.confidence_weight == 0 and head.confident:
            raise UserError(
                "train.loss.confidence_weight is 0, which leaves the confidence untrained: set head.confidence_head to false, "
                "or a weight."
            )
        if self.confidence_weight and not head.confident:
            raise UserError(
                f"train.loss.confidence_weight is {self.confidence_weight}, but {head.method} heads of this recipe say no "
                "confidence: leave it out."
            )
        unusual = {
            "tuned_kind": self.tuned_kind != "kl",
            "tuned_weight": bool(self.tuned_weight),
            "ramp": self.ramp > 0,
        }
        if (key := next((key for key, named in unusual.items() if named), None)) and not head.tunes:
            raise UserError(
                f"train.loss.{key} is {getattr(self, key)}, but {head.method} heads leave the target as it is: leave it out, or "
                "train medusa2."
            )

    def _of_parts(self, head: "DraftHead") -> list[float | None]:
        """The weights of losses that only some heads have: null where they count in full."""
        return [self.confidence_weight] * head.confident + [self.tuned_weight] * head.tunes

    def check_features(self, present: bool) -> None:
        """Raise UserError where the recipe weighs features that the head's outputs do not have."""
        if self.feature_weight and not present:
            raise UserError(
                f"train.loss.feature_weight is {self.feature_weight}, but no output of the head stands for a state of the target: "
                "leave it out, or train EAGLE-1."
            )

    def term_weights(self, features: bool, tuned: bool = False) -> tuple[float, float]:
        """Return the weights of the loss of logits and of features, of a head that has `features` or has not, and tunes
        the target or does not.

        Raises UserError for a weight on features that are not there.
        """
        self.check_features(features)
        feature_weight = float(features) if self.feature_weight is None else self.feature_weight
        usual = BESIDE_FEATURES if feature_weight else BESIDE_TUNED if tuned else 1.0
        return usual if self.weight is None else self.weight, feature_weight

    def draft_share(self, progress: float) -> float:
        """Return the share of their weight that the losses of the draft have at `progress` (0 to 1) of the training.

        Cai et al. (2024), section 2.3.2: a sine schedule from 0, so that new heads do not disturb the target.
        """
        return 1.0 if progress >= self.ramp else sin(pi / 2 * progress / self.ramp)

    def check_steps(self, steps: int) -> None:
        """Raise UserError where the weights are not those of a head that is trained on `steps` steps (or heads)."""
        if self.depth_weights is not None and len(self.depth_weights) != steps:
            raise UserError(
                f"train.loss.depth_weights has {len(self.depth_weights)} numbers, but the head is trained on {steps} steps: give "
                "one number for each."
            )

    def step_weight(self, offset: int) -> float:
        """Return the weight of step (or head) number `offset`."""
        return self.decay**offset if self.depth_weights is None else self.depth_weights[offset]

    @property
    def inputs(self) -> dict[str, Any]:
        """What a trained head depends on, to tell whether a finished one still fits."""
        neutral: dict[str, Any] = {"depth_weights": None, "beta": 0.5, "weight": None, "feature_weight": None}
        neutral |= {"also": {}, "confidence_weight": None, "tuned_kind": "kl", "tuned_weight": None, "ramp": 0.0}
        return without_neutral(asdict(self), neutral | {"top_k_weight": 0.0, "top_k": 10})
