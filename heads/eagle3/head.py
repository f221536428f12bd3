"""EAGLE-3: Llama layers, one in the paper, that read the target's aux streams and, in training, their own outputs (TTT).

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(2025), sections 3.1-3.2; the switches of EAGLE-3.1 follow vLLM's `llama_eagle3.py`.

Rows and steps are those of heads/eagle/base.py; the hidden state of step 0 is the fused aux streams of position t.
Shapes: H draft hidden, W draft vocab.
"""

from typing import ClassVar

from torch import Tensor

from draftsmith.heads.eagle.fused import FusedHead
from draftsmith.heads.eagle3 import Eagle3Options


class Eagle3Head(FusedHead):
    """The EAGLE-3 drafter."""

    method: ClassVar[str] = "eagle3"
    options_class = Eagle3Options
    options: Eagle3Options

    def feedback(self, out: Tensor) -> Tensor:
        """The last layer's output [..., H] -> the hidden state of the next step, [..., H]."""
        return self.norm(out) if self.options.norm_output else out


build, load = Eagle3Head.build, Eagle3Head.load
