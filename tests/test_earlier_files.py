"""Checkpoints and exports written by an earlier version load, and give the logits that they gave then.

tests/fixtures/earlier/METHOD holds a checkpoint, an export in the default layout, and `logits.safetensors`: the first rows
of what both gave on `waves`. All were written before the folders of heads/ were made.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data.batch import TrainBatch
from draftsmith.heads.base import drafting
from draftsmith.heads.formats.recognise import load_head
from draftsmith.target.target import Target
from tests.models import tiny_model

EARLIER = Path(__file__).parent / "fixtures" / "earlier"
LENGTH, STEPS = 24, 2


def waves(aux_layers: int, hidden: int) -> TrainBatch:
    """One document of tokens and states that need no random numbers."""
    place_L = torch.arange(LENGTH, dtype=torch.float32)

    def wave(width: int, shift: float) -> torch.Tensor:
        return torch.sin(place_L[:, None] * 0.7 + torch.arange(width)[None] * 0.3 + shift)[None]

    return TrainBatch(
        ids=(torch.arange(LENGTH) * 7 % 160)[None],
        mask=torch.ones(1, LENGTH, dtype=torch.bool),
        document=torch.zeros(1, LENGTH, dtype=torch.int64),
        position=torch.arange(LENGTH)[None],
        aux=wave(aux_layers * hidden, 0.0),
        last=wave(hidden, 1.0),
        top1=torch.zeros(1, LENGTH, dtype=torch.int64),
        logsumexp=torch.zeros(1, LENGTH),
    )


@pytest.mark.parametrize("method", sorted(path.name for path in EARLIER.iterdir()))
@pytest.mark.parametrize("kind", ["checkpoint", "export"])
def test_an_earlier_head_gives_its_logits(method: str, kind: str) -> None:
    target = Target(tiny_model("llama"), path="tiny", fingerprint="abc")
    folder = method if kind == "export" else kind
    head = load_head(EARLIER / method / folder, target)
    assert head.method == method
    with torch.no_grad(), drafting(head):
        output = head(waves(len(head.reads.layer_ids), target.hidden_size), STEPS)
    stored = load_file(EARLIER / method / "logits.safetensors")
    for step in output.steps:
        torch.testing.assert_close(step.logits[:6], stored[f"{folder}.{step.offset}"], atol=1e-4, rtol=1e-4)
