"""JetSpec: DFlash's layers in a causal block, whose slots see the text, the slots before them and themselves.

"JetSpec" (2026, arXiv 2606.18394); its code is hao-ai-lab/JetSpec. All slots but the first hold the mask, so no token knows a
drafted one, as with DFlash. But no slot depends on how long the block is: a shorter draft is the beginning of a longer one, a block
is filled in no further than the draft, and one pass tells the acceptance of all lengths.

The loss of the paper is the forward KL from the target, all slots alike: `kind: kl`, `decay: 1`, `normalize: weights`, and
`temperature` for its T, 1 by default.
"""

from typing import ClassVar

from draftsmith.heads.dflash.head import DFlashHead
from draftsmith.heads.jetspec import JetSpecOptions


class JetSpecHead(DFlashHead):
    """The JetSpec drafter: a block of S slots drafts S - 1 tokens, none of which knows the others."""

    method: ClassVar[str] = "jetspec"
    options_class = JetSpecOptions
    causal = True
    whole = False


build, load = JetSpecHead.build, JetSpecHead.load
