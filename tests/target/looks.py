"""What a target computes, answers and teaches, to hold two ways of loading one against each other.

python -m torch.distributed.run --nproc_per_node 2 tests/target/looks.py TARGET FOLDER   # as two processes share it
"""

import sys
from pathlib import Path
from typing import Any

import torch

import draftsmith
from draftsmith.data.features.extract import OnlineSource, extract
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling, row_key
from draftsmith.decoder.trees import DynamicTree
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import methods
from draftsmith.target.pretrained import probe_ids
from draftsmith.target.target import Target
from draftsmith.train.feed import read_batch
from tests.gpu.support import LAYERS, OPTIONS, make_texts


def look(target: Target, folder: Path) -> dict[str, Any]:
    """Return the states of a target, online and as stored, the loss of a head on them with its gradients, and answers, alone and with
    a tree, two rows and a prompt that waits."""
    output, samples = target.forward(probe_ids(target), layer_ids=LAYERS), make_texts(6, 10)
    online, store = OnlineSource(target, samples, LAYERS), extract(target, samples, folder, layer_ids=LAYERS)
    batch = read_batch(online, [[0, 1], [2, 3, 4, 5]], LAYERS, 100).to(target.device)
    torch.manual_seed(0)
    head = methods()["eagle3"].build(OPTIONS["eagle3"], target, None).eval()
    loss = head_loss(head(batch, 3), batch, target.head, head.draft_vocab, LossSpec()).loss_sum
    loss.backward()
    found = [output.aux, output.last, batch.aux, batch.last, loss.detach()]
    found += [x for f in (store.get(0), store.get(3)) for x in (f.aux, f.last, f.logsumexp)]
    gradients = [p.grad.cpu() for p in head.parameters() if p.grad is not None]
    prompts = [[5, 7, 9, 5, 7], [5, 7, 9, 11, 30, 80], [4, 4, 4]]
    requests = [Request(f"p{i}", "a", tuple(ids), 5 + 3 * i, row_key(0, i)) for i, ids in enumerate(prompts)]
    tree = methods()["eagle3"].make_drafter(head, 3, tree=DynamicTree(3, 4, 16))
    drafts = ((TargetAlone(), Sampling()), (tree, Sampling(0.8)))
    decoded = [decode_batch(target, drafter, requests, sampling, rows=2).generations for drafter, sampling in drafts]
    texts = [[generation.output_ids for generation in generations] for generations in decoded]
    return {"states": [x.cpu() for x in found], "gradients": gradients, "texts": texts}


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Hold two looks against each other: states within 1e-5 of the largest, equal texts."""
    assert ours["texts"] == theirs["texts"]
    for name, most in (("states", 1e-5), ("gradients", 1e-4)):
        assert len(ours[name]) == len(theirs[name]) > 0
        for a, b in zip(ours[name], theirs[name], strict=True):
            assert float((a - b).abs().max()) <= most * float(b.abs().max()) + 1e-7, name


def main(path: str, folder: Path) -> None:
    """Look at a target that this process shares with another one, and write what was seen."""
    target = draftsmith.load_target(path, tensor_parallel=2)
    rank = torch.distributed.get_rank()
    held = sum(p.to_local().numel() for p in target.model.parameters() if hasattr(p, "to_local"))
    assert 0 < held < 0.6 * sum(p.numel() for p in target.model.parameters())
    torch.save(look(target, folder / f"store-{rank}"), folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
