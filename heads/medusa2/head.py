"""Medusa-2: Medusa's heads and the target are trained together, the target through an adapter (LoRA).

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), sections 2.2.2
(joint training) and 2.3.2 (self-distillation): L = L_LM + lambda * sum_i decay^i L_i. The teacher of both parts is the
original target, whose states the batch holds. What training leaves is a tuned target, and heads that are Medusa-1
heads of it.

Shapes: B batch rows, L tokens, R rows, H target hidden, V target vocab.
"""

from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import HeadOutput, StepOutput, answer_rows
from draftsmith.heads.medusa.head import MedusaHead, start_as_the_target
from draftsmith.heads.medusa.options import MedusaOptions
from draftsmith.heads.medusa2.options import Medusa2Options
from draftsmith.target.target import Target, TargetHead
from draftsmith.target.tuned import AdapterSpec, TunedTarget


class Medusa2Head(MedusaHead):
    """Heads and adapter in training. Parameters: those of `MedusaHead`, and
    `adapter.{layer of the target}.{lora_A,lora_B}.weight`; the target's own weights are none of them.

    The target itself stays as it is: the adapter works in a view of its model.
    """

    method: ClassVar[str] = "medusa2"
    options: Medusa2Options

    def __init__(self, options: Medusa2Options, target: Target) -> None:
        super().__init__(options, target.head)
        # The two factors of an adapter are no whole matrices.
        self.trains = replace(self.trains, outputs=frozenset({"tuned"}), no_muon=("lora_",))
        modules = None if options.target_modules is None else tuple(options.target_modules)
        spec = AdapterSpec(
            options.lora_r, options.lora_alpha, options.lora_dropout, modules, lm_head=options.tune_lm_head
        )
        # In a list, so that the model is not registered.
        self._tuned = [TunedTarget(target, spec)]
        self.adapter = self.tuned.layers

    @property
    def tuned(self) -> TunedTarget:
        """The target with the adapter."""
        return self._tuned[0]

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Run the tuned target over the batch's tokens, then the heads on its states; return the logits of both."""
        states_BLH = self.tuned.states(batch)
        steps = super().forward(replace(batch, last=states_BLH), num_steps).steps
        rows = answer_rows(batch).flatten().nonzero().flatten()
        return HeadOutput(steps, StepOutput(-1, rows, self.project(states_BLH.flatten(0, 1)[rows])))

    def project(self, state: Tensor) -> Tensor:
        """State [..., H] -> fp32 logits [..., V] by the tuned target's output projection."""
        return self.tuned.logits(state)

    def lr_factor(self, name: str) -> float:
        """The adapter learns at a rate of its own."""
        return self.options.adapter_lr if name.startswith("adapter.") else 1.0

    def deployed(self, target: Target) -> "DeployedMedusa2":
        """Return the heads for the tuned target, which verifies their drafts; its weights are merged in the dtype of
        `target`, the original."""
        return DeployedMedusa2(self, self.tuned.merged(target))

    def served(self) -> MedusaHead:
        """Return the heads as engines read them: Medusa heads of a target that has no adapter."""
        return _plain(self, self.target_head)


class DeployedMedusa2(MedusaHead):
    """Medusa-2's heads as they draft: Medusa heads of the tuned target. The adapter is merged into that, and a part of
    this module only as a count of what was trained."""

    method: ClassVar[str] = "medusa2"

    def __init__(self, trained: Medusa2Head, tuned: Target) -> None:
        with torch.device("meta"):
            super().__init__(trained.options, tuned.head)
        self.trains = trained.trains
        self.blocks, self.lm_heads, self.adapter = trained.blocks, trained.lm_heads, trained.adapter
        self._trained, self._verifier = [trained], [tuned]
        self.train(trained.training)  # of which it shares the modules

    def verifier(self, target: Target) -> Target:
        """Return the tuned target."""
        return self._verifier[0]

    @property
    def tuned(self) -> TunedTarget:
        """The original target with the adapter, as trained."""
        return self._trained[0].tuned

    def served(self) -> MedusaHead:
        """Return the heads as engines read them."""
        return _plain(self, self.target_head)


def _plain(head: MedusaHead, target_head: TargetHead) -> MedusaHead:
    options = MedusaOptions(**{field.name: getattr(head.options, field.name) for field in fields(MedusaOptions)})
    with torch.device("meta"):
        plain = MedusaHead(options, target_head)
    plain.blocks, plain.lm_heads = head.blocks, head.lm_heads
    return plain.train(head.training)


def build(options: Medusa2Options, target: Target, draft_vocab: Tensor | None) -> Medusa2Head:
    """Return untrained fp32 heads, their projections those of the target, and an adapter that changes nothing."""
    assert draft_vocab is None, "Medusa predicts the whole vocabulary"
    with torch.device(target.device):
        return start_as_the_target(Medusa2Head(options, target))


def load(spec: dict[str, Any], target: Target, draft_vocab: Tensor | None) -> Medusa2Head:
    """Return the heads and the adapter that `describe` wrote down, weights still to be filled in."""
    assert draft_vocab is None
    with torch.device(target.device):
        return Medusa2Head(Medusa2Options(**spec["options"]), target)
