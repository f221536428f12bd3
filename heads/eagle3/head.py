"""EAGLE-3: Llama layers, one in the paper, that read the target's aux streams and, in training, their own outputs (TTT).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(2025), sections 3.1-3.2; the switches of EAGLE-3.1 follow vLLM's `llama_eagle3.py`.

Rows and steps are those of heads/eagle/base.py; the hidden state of step 0 is the fused aux streams of position t.
Shapes: H draft hidden, W draft vocab.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.heads.eagle.fused import FusedHead, start
from draftsmith.heads.eagle3.options import Eagle3Options
from draftsmith.target.target import Target


class Eagle3Head(FusedHead):
    """The EAGLE-3 drafter."""

    method: ClassVar[str] = "eagle3"
    options: Eagle3Options

    def feedback(self, out: Tensor) -> Tensor:
        """The last layer's output [..., H] -> the hidden state of the next step, [..., H]."""
        return self.norm(out) if self.options.norm_output else out


def build(options: Eagle3Options, target: Target, draft_vocab: Tensor | None) -> Eagle3Head:
    """Return an untrained fp32 head for `target`, see `start`."""
    return start(Eagle3Head, options, target, draft_vocab)


def load(spec: dict[str, Any], target: Target, draft_vocab: Tensor | None) -> Eagle3Head:
    """Return the head that `Eagle3Head.describe` and its layer_ids wrote down; its weights are still to be filled in."""
    options, config = Eagle3Options(**spec["options"]), LlamaConfig(**spec["layer_config"])
    with torch.device(target.device):
        return Eagle3Head(options, config, spec["layer_ids"], target.embedding, draft_vocab)
