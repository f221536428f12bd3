"""A target whose layers are on two pretended GPUs computes, decodes and trains what it does on one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import draftsmith
from draftsmith.data.batch import collate
from draftsmith.data.features.extract import OnlineSource, compute_features
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling, row_key
from draftsmith.decoder.trees import DynamicTree
from draftsmith.errors import UserError
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import methods
from draftsmith.target.pretrained import probe_ids
from draftsmith.target.target import Target
from tests.gpu.support import LAYERS, make_head, make_texts
from tests.models import save_tiny_target
from tests.pretended_gpu.cuda import pretended_gpu

pytestmark = pytest.mark.full
KINDS = ["llama", pytest.param("gemma3", marks=pytest.mark.slow)]


@pytest.fixture(name="path", params=KINDS, scope="module")
def _path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    return save_tiny_target(tmp_path_factory.mktemp("target") / request.param, request.param)


def look(target: Target) -> dict[str, Any]:
    """Return the states of a target, what it answers, and the loss of a head on hidden states made online."""
    output = target.forward(probe_ids(target), layer_ids=LAYERS)
    prompts = [[5, 7, 9, 5, 7], [5, 7, 9, 11, 30, 80], [4, 4, 4]]
    requests = [Request(f"p{i}", "a", tuple(ids), 5 + 3 * i, row_key(0, i)) for i, ids in enumerate(prompts)]
    head = make_head(target, "eagle3").eval()
    tree = methods()["eagle3"].make_drafter(head, 3, tree=DynamicTree(3, 4, 16))
    drafts = ((TargetAlone(), Sampling()), (tree, Sampling(0.8)))
    decoded = [decode_batch(target, drafter, requests, sampling, rows=2).generations for drafter, sampling in drafts]
    texts = [[generation.output_ids for generation in generations] for generations in decoded]
    source = OnlineSource(target, make_texts(6, 10), LAYERS)
    batch = collate([source.get_many([0, 1]), source.get_many([2, 3, 4, 5])], 100).to(target.device)
    stored = compute_features(target, make_texts(6, 10)[:2], LAYERS, target.dtype)
    loss = head_loss(head(batch, 3), batch, target.head, head.draft_vocab, LossSpec()).loss_sum
    states = [output.aux, output.last, loss.detach(), *(x for f in stored for x in (f.aux, f.last, f.logsumexp))]
    return {"states": [x.cpu() for x in states], "texts": texts}


def test_two_gpus_compute_what_one_does(path: str) -> None:
    with pretended_gpu(1):
        one = look(draftsmith.load_target(path, device="cuda"))
    with pretended_gpu(2):
        target = draftsmith.load_target(path, device="cuda", gpus=2)
        devices = [next(layer.parameters()).device.index for layer in target._layers]
        assert (sorted(devices), set(devices)) == (devices, {0, 1})
        assert {target.device.index, target.head.weight.device.index} == {0}
        two = look(target)
    for ours, theirs in zip(two["states"], one["states"], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert two["texts"] == one["texts"]


@pytest.mark.parametrize(
    ("device", "gpus", "why"),
    [
        ("cuda:1", 2, "target.gpus is 2, from cuda:1 on, but torch sees 2"),
        ("cpu", 2, "target.gpus is 2, from cpu on, but target.device is cpu"),
        ("cuda", 10, "target.gpus is 10, from cuda:0 on, but torch sees 2"),
    ],
)
def test_gpus_that_are_not_there_are_refused(device: str, gpus: int, why: str, tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "target", "llama", num_hidden_layers=3)
    with pretended_gpu(2), pytest.raises(UserError, match=why):
        draftsmith.load_target(path, device=device, gpus=gpus)


def test_more_gpus_than_layers_are_refused(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "target", "llama", num_hidden_layers=3)
    with pretended_gpu(4), pytest.raises(UserError, match="has 3 layers to spread: lower it to 3 or less"):
        draftsmith.load_target(path, device="cuda", gpus=4)
    with pretended_gpu(3):
        target = draftsmith.load_target(path, device="cuda", gpus=3)
        assert [next(layer.parameters()).device.index for layer in target._layers] == [0, 1, 2]
