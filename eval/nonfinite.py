"""Where a target's numbers stop being numbers: found by one plain pass over the text, when it is already too late.

Shapes: L tokens, H hidden.
"""

import torch

from draftsmith.errors import UserError
from draftsmith.heads.target import Target


@torch.no_grad()
def explain(target: Target, sample_id: str, text: list[int]) -> UserError:
    """Return the error for logits after `text` that are NaN or infinite: it names the position and the layer."""
    layers = tuple(range(target.num_layers))
    output = target.forward(torch.tensor([text], device=target.device), layer_ids=layers)
    streams_kLH = output.aux[0].unflatten(-1, (target.num_layers, -1)).transpose(0, 1)
    # Layer k's output is the stream that enters layer k + 1, the last one's is seen through the final norm.
    bad_kL = ~torch.cat([streams_kLH, output.last]).isfinite().all(-1)
    if bool(bad_kL.any()):
        # The layer first: through attention's zero weights its NaN reaches every position of the next.
        first = int(bad_kL.any(1).int().argmax())
        position = int(bad_kL[first].int().argmax())
        where = "in the embedding" if first == 0 else f"in layer {first - 1}"
    else:
        position, where = len(text) - 1, "in the output projection"
        if bool(target.head.logits(output.last[0, -1]).isfinite().all()):
            where = "in the pass over the draft alone (a plain pass over the same text has none)"
    return UserError(
        f"The target's logits for {sample_id} are not finite: NaN or infinity first appears at position {position}, "
        f"{where}; decode in a wider dtype, or check the target's weights."
    )
