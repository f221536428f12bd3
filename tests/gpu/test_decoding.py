"""Decoding on a GPU: the text of the target alone, tau as simulated, at fp32 and bf16."""

from functools import cache

import pytest
import torch

from draftsmith.decoder.answers import Generation, Request, tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling, row_key
from draftsmith.decoder.selfcheck import check_decoding
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.eval.simulate.texts import head_simulator
from draftsmith.heads.base import DraftHead
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.registry import methods
from draftsmith.target.pretrained import check_target
from draftsmith.target.target import Target
from tests.gpu.support import (
    DEVICE,
    LAYERS,
    OPTIONS,
    make_data,
    make_head,
    make_recipe,
    make_target,
    make_texts,
    on_gpu,
)

pytestmark = on_gpu
TREE = StaticTree.of("few", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
# The target that Medusa-2 tunes is another one.
CHAINS = sorted(set(OPTIONS) - {"medusa2"})
DRAFTS = [*((method, None) for method in CHAINS), ("eagle3", TREE), ("medusa", TREE), ("hydra", TREE)]
NAMES = [method if tree is None else f"{method}-tree" for method, tree in DRAFTS]
# Ways to draft that no text alone tells the acceptance of.
UNCERTAIN = [
    ("eagle3", {"tree": DynamicTree(3, 4, 16)}),
    ("eagle3", {"tree": TREE, "drawn": True}),
    ("medusa", {"tree": TREE, "drawn": True}),
]


@cache
def trained(method: str) -> DraftHead:
    """A head that has seen the texts a few hundred times, so that some drafts are accepted and some are not."""
    target = make_target()
    head, samples = make_head(target, method), make_texts()
    from draftsmith.train.feed import read_batch

    source = make_data(target, samples).source
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    batch = read_batch(source, [range(i, i + 4) for i in range(0, 16, 4)], LAYERS, 128).to(DEVICE)
    spec = make_recipe().train.loss
    for _ in range(60):
        optimizer.zero_grad()
        loss = head_loss(head(batch, 3), batch, target.head, head.draft_vocab, spec)
        (loss.loss_sum / loss.rows).backward()
        optimizer.step()
    return head.eval()


def make_requests(count: int = 5) -> list[Request]:
    prompts = [[3 + i % 4, 7, 9, *range(20, 20 + 3 * i)] for i in range(count)]
    return [Request(f"p{i}", "a", tuple(ids), 24, row_key(0, i)) for i, ids in enumerate(prompts)]


def answer(target: Target, method: str | None, tree: StaticTree | None, sampling: Sampling) -> list[Generation]:
    drafter = TargetAlone()
    if method is not None:
        head = trained(method)
        options = {} if tree is None else {"tree": tree}
        drafter = methods()[method].make_drafter(head, 3, **options)
    return decode_batch(target, drafter, make_requests(), sampling).generations


@pytest.mark.parametrize(("method", "tree"), DRAFTS, ids=NAMES)
def test_greedy_texts_are_the_targets_and_tau_is_as_simulated(method, tree):
    target = make_target()
    alone = answer(target, None, None, Sampling())
    drafted = answer(target, method, tree, Sampling())
    assert [g.output_ids for g in drafted] == [g.output_ids for g in alone]
    here = decode_batch(make_target("cpu"), TargetAlone(), make_requests(), Sampling()).generations
    assert [g.output_ids for g in alone] == [g.output_ids for g in here], "the CPU's texts in fp32"
    decoded = total((tally_generation(g, 3) for g in drafted), 3)
    simulated = head_simulator(trained(method), tree=tree)(target, drafted, Sampling(), 3).tallies
    assert decoded.tau > 1.05, "a head that is never right would make this test easy"
    assert decoded.tau == pytest.approx(total((t[2] for t in simulated), 3).tau, abs=1e-9)


@pytest.mark.parametrize(("method", "tree"), DRAFTS, ids=NAMES)
def test_sampled_answers_come_out_whole(method, tree):
    sampling = Sampling(1.0, top_p=0.95)
    target = make_target()
    drafted = answer(target, method, tree, sampling)
    assert all(g.finish_reason in ("eos", "length") and g.output_ids for g in drafted)
    simulated = head_simulator(trained(method), tree=tree)(target, drafted, sampling, 3)
    assert simulated.off_text <= 1
    assert [g.output_ids for g in answer(target, method, tree, sampling)] == [g.output_ids for g in drafted]


def test_sampled_texts_of_the_target_alone_are_those_of_the_cpu():
    there = answer(make_target(), None, None, Sampling(1.0))
    here = decode_batch(make_target("cpu"), TargetAlone(), make_requests(), Sampling(1.0)).generations
    same = [a.output_ids == b.output_ids for a, b in zip(here, there, strict=True)]
    assert sum(same) >= len(same) - 1, "rounding may tip one draw"


@pytest.mark.parametrize(("method", "tree"), DRAFTS, ids=NAMES)
def test_bf16_decodes_what_it_accepts(method, tree):
    target = make_target(dtype=torch.bfloat16)
    head = trained(method)
    half = methods()[method].load(
        {"options": _options(head), **_layer(head), "layer_ids": list(head.reads.layer_ids)}, target, None
    )
    half.load_state_dict(head.state_dict())
    half = half.to(DEVICE, torch.bfloat16).eval()
    drafter = methods()[method].make_drafter(half, 3, **({} if tree is None else {"tree": tree}))
    drafted = decode_batch(target, drafter, make_requests(), Sampling()).generations
    decoded = total((tally_generation(g, 3) for g in drafted), 3)
    simulated = head_simulator(half, tree=tree)(target, drafted, Sampling(), 3).tallies
    assert decoded.tau == pytest.approx(total((t[2] for t in simulated), 3).tau, rel=0.15)


def _options(head: DraftHead) -> dict[str, object]:
    return head.describe()["options"]


def _layer(head: DraftHead) -> dict[str, object]:
    return {key: value for key, value in head.describe().items() if key != "options"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_checks_pass(dtype):
    target = make_target(dtype=dtype)
    check_target(target)
    check_decoding(target)


@pytest.mark.parametrize(("method", "options"), UNCERTAIN, ids=["dynamic", "eagle3-drawn", "medusa-drawn"])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0, min_p=0.05, repetition_penalty=1.2)], ids=["T=0", "T=1"]
)
def test_prompts_that_wait_get_the_answers_they_have_alone(method, options, sampling):
    target, head = make_target(), trained(method)
    requests = make_requests(6)
    together = decode_batch(target, methods()[method].make_drafter(head, 3, **options), requests, sampling, rows=2)
    for request, found in zip(requests, together.generations, strict=True):
        drafter = methods()[method].make_drafter(head, 3, **options)
        (alone,) = decode_batch(target, drafter, [request], sampling).generations
        assert found.output_ids == alone.output_ids
    if sampling.greedy:
        plain = decode_batch(target, TargetAlone(), requests, sampling).generations
        assert [g.output_ids for g in plain] == [g.output_ids for g in together.generations]


def test_no_kernel_is_planned_anew_for_every_length():
    make_target()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    target = make_target(dtype=torch.bfloat16)
    texts = [[g.output_ids for g in answer(target, "eagle3", None, Sampling())] for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]
