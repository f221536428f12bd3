"""Medusa-2: Medusa's heads and the target are trained together, the target through an adapter (LoRA).

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), sections 2.2.2
(joint training) and 2.3.2 (self-distillation): L = L_LM + lambda * sum_i decay^i L_i. The teacher of both parts is the
original target, whose states the batch holds. What training leaves is a tuned target, and heads that are Medusa-1
heads of it.

Shapes: B batch rows, L tokens, R rows, H target hidden, V target vocab.
"""

from copy import copy
from dataclasses import fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from draftsmith.data.batch import TrainBatch, plan_documents
from draftsmith.heads.base import HeadOutput, StepOutput, answer_rows
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import MedusaHead
from draftsmith.heads.medusa2 import Medusa2Options
from draftsmith.heads.plan import Plan, flat_rows
from draftsmith.target.target import Target
from draftsmith.target.tuned import AdapterSpec, TunedTarget


class Medusa2Head(MedusaHead):
    """Heads and adapter. Parameters: those of `MedusaHead`, and
    `adapter.{layer of the target}.{lora_A,lora_B}.weight`; the target's own weights are none of them.

    The target itself stays as it is: the adapter works in a view of its model. merged: the tuned target of deployed heads, None
    in training.
    """

    method: ClassVar[str] = "medusa2"
    options_class = Medusa2Options
    options: Medusa2Options
    merged: Target | None = None

    def __init__(self, options: Medusa2Options, config: None, target: Target, *_: object) -> None:
        super().__init__(options, config, target)
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

    def plan(self, batch: TrainBatch, num_steps: int) -> Plan:
        """As `DraftHead.plan`, with the passes of the target that is tuned."""
        plan = super().plan(batch, num_steps)
        if self.merged is not None:
            return plan
        passes, draw = plan_documents(batch.document, batch.ids.numel()), int(batch.seeds.sum())
        return replace(
            plan, passes=passes, tuned=flat_rows(answer_rows(batch)), draw=None if batch.seed is None else draw
        )

    def forward(self, batch: TrainBatch, num_steps: int) -> HeadOutput:
        """Run the tuned target over the batch's tokens, then the heads on its states; return the logits of both. Deployed heads
        read the batch's states, and return their own logits."""
        if self.merged is not None:
            return super().forward(batch, num_steps)
        plan = self.planned(batch, num_steps)
        states_BLH = self.tuned.states(batch, plan.passes, plan.draw)
        steps = super().forward(replace(batch, last=states_BLH, plan=plan), num_steps).steps
        assert plan.tuned is not None
        return HeadOutput(steps, StepOutput(-1, plan.tuned, states_BLH.flatten(0, 1)[plan.tuned], self.project))

    def project(self, state: Tensor) -> Tensor:
        """State [..., H] -> fp32 logits [..., V] by the tuned target's output projection."""
        return self.tuned.logits(state) if self.merged is None else super().project(state)

    def lr_factor(self, name: str) -> float:
        """The adapter learns at a rate of its own."""
        return self.options.adapter_lr if name.startswith("adapter.") else 1.0

    def deployed(self, target: Target) -> "Medusa2Head":
        """Return the heads as they draft, of the same weights: Medusa heads of the tuned target, which verifies their drafts and
        whose weights are merged in the dtype of `target`, the original. The adapter is a part only as a count of what was trained."""
        other = copy(self)
        other.merged = self.tuned.merged(target)
        other._target_head = [other.merged.head]
        return other

    def verifier(self, target: Target) -> Target:
        """Return the tuned target of deployed heads, the original of those in training."""
        return target if self.merged is None else self.merged

    def served(self) -> MedusaHead:
        """Return the heads as engines read them: Medusa heads of a target that has no adapter."""
        options = MedusaOptions(**{field.name: getattr(self.options, field.name) for field in fields(MedusaOptions)})
        with torch.device("meta"):
            plain = MedusaHead(options, None, self.verifier(self.tuned.target))
        plain.blocks, plain.lm_heads = self.blocks, self.lm_heads
        return plain.train(self.training)


build, load = Medusa2Head.build, Medusa2Head.load
