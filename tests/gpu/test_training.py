"""Training on a GPU: the trajectory of the CPU in fp32, and a head that learns in bf16."""

import json

import pytest
import torch

from draftsmith.heads.formats.recognise import load_head
from draftsmith.train.loop import train
from tests.gpu.support import DEVICE, OPTIONS, make_data, make_head, make_recipe, make_target, make_texts, on_gpu

pytestmark = on_gpu


def run(device, method, folder, **options):
    """Train and return the losses, step by step."""
    target = make_target(device)
    train(make_recipe(**options), target, make_head(target, method), make_data(target, make_texts()), folder)
    assert load_head(folder / "best", target).method == method
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", OPTIONS)
def test_the_loss_goes_as_on_the_cpu_in_fp32(method, tmp_path):
    there = run(DEVICE, method, tmp_path / "there", epochs=3)
    # Accelerate remembers its first device for a whole process, so the CPU's losses are computed by hand.
    from draftsmith.decoder.sampling import row_key
    from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
    from draftsmith.train.feed import Feed
    from draftsmith.train.schedule import Schedule, build_optimizers, lr_factor, set_lr

    target, recipe = make_target("cpu"), make_recipe(epochs=3)
    head, data = make_head(target, method), make_data(target, make_texts())
    optimizers, losses = build_optimizers(head, recipe.train), []
    schedule = Schedule([data.source.lengths[i] for i in data.train], recipe.train, recipe.seed, 1)
    shares = [schedule.share(epoch, 0) for epoch in range(3)]
    feed, total = Feed(data, head.train(), recipe.train, torch.device("cpu")), sum(map(len, shares))
    seeds = [row_key(recipe.seed, "epoch", epoch) for epoch in range(3)]
    micros = ((micro, seed) for share, seed in zip(shares, seeds, strict=True) for micro in share)
    for step, (micro,) in enumerate(feed.windows(micros)):
        batch = feed.batch(micro)
        set_lr(optimizers, lr_factor(step, total, recipe.train))
        loss = head_loss(head(batch, head.trains.steps), batch, target.head, head.draft_vocab, recipe.train.loss)
        loss = loss.loss_sum / loss_divisor(batch, recipe.train.loss, head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), recipe.train.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert len(there) == len(losses) > 10
    assert losses[-1] < losses[0]
    # Muon orthogonalises in bf16, so rounding grows from step to step.
    assert [line["loss"] for line in there][:3] == pytest.approx(losses[:3], rel=2e-3)
    assert [line["loss"] for line in there] == pytest.approx(losses, rel=0.1)


@pytest.mark.parametrize("method", OPTIONS)
def test_a_head_learns_in_bf16(method, tmp_path):
    lines = run(DEVICE, method, tmp_path, precision="bf16")
    # EAGLE-1 learns states beside tokens, through noise.
    assert lines[-1]["loss"] < (0.7 if method == "eagle1" else 0.6) * lines[0]["loss"]
    assert max(line["tau"]["overall"] for line in lines if "tau" in line) > 1.1
