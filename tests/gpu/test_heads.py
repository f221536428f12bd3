"""Heads on a GPU: losses and features are those of the CPU, exports reload; test_decoding.py has the training pass and decoding."""

import pytest
import torch

from draftsmith.data.batch import collate
from draftsmith.data.features.extract import compute_features, extract
from draftsmith.heads.base import HeadOutput, StepOutput
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.layout import default_layout, layouts, layouts_of
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from tests.gpu.support import DEVICE, LAYERS, OPTIONS, make_head, make_target, make_texts, on_gpu

pytestmark = on_gpu


def make_batch(target):
    """Two packed rows of the target's features."""
    features = compute_features(target, make_texts(6), LAYERS, target.dtype)
    return collate([features[:2], features[2:6]], 100)


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize(
    "spec", [LossSpec(), LossSpec("lk_hybrid", normalize="sequence"), LossSpec("hard_ce")], ids=str
)
def test_a_training_step_is_that_of_the_cpu(method, spec):
    found = {}
    batch = make_batch(make_target("cpu"))
    for device in ("cpu", DEVICE):
        target = make_target(device)
        head, there = make_head(target, method), batch.to(device)
        loss = head_loss(head(there, 3), there, target.head, head.draft_vocab, spec)
        (loss.loss_sum / loss_divisor(there, spec, head)).backward()
        gradients = {name: p.grad.cpu() for name, p in head.named_parameters() if p.grad is not None}
        found[str(device)] = (loss, gradients)
    (here, ours), (there, theirs) = found["cpu"], found[str(DEVICE)]
    assert there.loss_sum.item() == pytest.approx(here.loss_sum.item(), rel=1e-4)
    assert there.step_rows.tolist() == here.step_rows.tolist()
    assert there.step_correct.tolist() == here.step_correct.tolist()
    torch.testing.assert_close(there.step_acceptance.cpu(), here.step_acceptance, rtol=1e-4, atol=1e-4)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (theirs[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-7, name


def test_a_draft_vocabulary_and_its_losses_stay_on_the_device():
    target = make_target()
    vocab = torch.arange(0, target.vocab_size, 2, device=DEVICE)
    batch = make_batch(target).to(DEVICE)
    output = make_head(target, "eagle3", vocab)(batch, 3)
    picked = HeadOutput(tuple(StepOutput(s.offset, s.rows, s.logits) for s in output.steps))
    loss = head_loss(picked, batch, target.head, vocab, LossSpec("kl"))
    assert loss.loss_sum.device.type == DEVICE.type
    assert torch.isfinite(loss.loss_sum)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)], ids=["fp32", "bf16"])
def test_features_are_those_of_the_cpu(dtype, tolerance):
    samples = make_texts(6)
    here, there = (compute_features(make_target(d, dtype), samples, LAYERS, dtype) for d in ("cpu", DEVICE))
    for a, b in zip(here, there, strict=True):
        assert b.aux.device.type == "cpu"
        for name in ("aux", "last", "logsumexp"):
            ours, theirs = getattr(a, name).float(), getattr(b, name).float()
            assert (ours - theirs).norm() <= tolerance * ours.norm(), name
        assert (a.top1 == b.top1).float().mean() >= (1.0 if dtype == torch.float32 else 0.9)


def test_a_store_is_written_from_the_gpu(tmp_path):
    target, samples = make_target(dtype=torch.bfloat16), make_texts(6)
    store = extract(target, samples, tmp_path / "features", layer_ids=LAYERS)
    alone = compute_features(target, samples, LAYERS, torch.bfloat16)
    for index, features in enumerate(alone):
        assert torch.equal(store.get(index).aux, features.aux)


# A draft model and a tuned target are written with the files of a target that lies on disk.
@pytest.mark.parametrize("method", sorted(set(OPTIONS) - {"draft_model", "medusa2"}))
def test_checkpoint_and_export_come_back(method, tmp_path):
    target = make_target()
    head = make_head(target, method).eval()
    batch = make_batch(target).to(DEVICE)
    save_head(head, tmp_path / "head", target)
    others = [load_head(tmp_path / "head", target)]
    if layouts_of(method):
        export_head(head, target, tmp_path / "export", dtype="float32")
        others.append(layouts()[default_layout(method)].load(tmp_path / "export", target).eval())
    for again in others:
        for ours, theirs in zip(head(batch, 3).steps, again(batch, 3).steps, strict=True):
            torch.testing.assert_close(theirs.logits, ours.logits)
