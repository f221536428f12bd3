"""Nothing is left on the CPU: decoding, simulating and training on a pretended second device, value for value."""

from collections.abc import Callable

import pytest
import torch

from draftsmith.data.batch import collate
from draftsmith.data.features.extract import compute_features, summarise_logits
from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.decoder.drafters.known_acceptance import KnownAcceptance
from draftsmith.decoder.drafters.lookahead import Lookahead
from draftsmith.decoder.drafters.suffix_decoding import Outputs, SuffixDecoding, SuffixRules
from draftsmith.decoder.drafters.texts import PromptLookup
from draftsmith.decoder.sampling import Sampling, row_key
from draftsmith.decoder.selfcheck import check_decoding
from draftsmith.decoder.trees import StaticTree
from draftsmith.decoder.verify import Typical
from draftsmith.eval.simulate.texts import draft_model_simulator, simulate_generations
from draftsmith.heads.base import DraftHead
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import methods
from draftsmith.target.pretrained import check_target
from draftsmith.target.target import Target
from draftsmith.train.metrics import evaluate_heldout, make_heldout_batches
from tests.far_device import far_device, move_module
from tests.gpu.support import OPTIONS, make_data, make_texts
from tests.models import make_target, tiny_model

pytestmark = pytest.mark.full

LAYERS = (2, 4, 6)
TREE = StaticTree.of("few", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
HEADS = {
    "eagle3": (Eagle3Options(layer_ids=list(LAYERS), ttt_steps=3, draft_vocab_size=80), torch.arange(0, 160, 2)),
    **{method: (options, None) for method, options in OPTIONS.items() if method != "eagle3"},
}
SAMPLINGS = [Sampling(), Sampling(0.8, top_k=30, top_p=0.9)]
# The target that Medusa-2 tunes is another one.
CHAINS = sorted(set(HEADS) - {"medusa2"})
WAYS = [
    (method, tree, sampling)
    for method, tree in [*((method, None) for method in CHAINS), ("medusa", TREE), ("hydra", TREE)]
    for sampling in SAMPLINGS
]


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def make_head(target: Target, method: str) -> DraftHead:
    options, vocab = HEADS[method]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return methods()[method].build(options, target, vocab)


def make_far_target() -> Target:
    return Target(move_module(tiny_model("llama")), path="tiny", fingerprint="0")


def make_far_head(target: Target, method: str) -> DraftHead:
    """Built on the device itself, then given the weights of the CPU's head."""
    options, vocab = HEADS[method]
    far = methods()[method].build(options, target, vocab)
    for name, value in make_head(make_target(), method).state_dict().items():
        far.state_dict()[name].copy_(value)
    return far


def make_requests() -> list[Request]:
    prompts = [[5, 7, 9, 5, 7], [5, 7, 9, 11, 30, 80], [4, 4, 4]]
    return [Request(f"p{i}", "a", tuple(ids), 5 + 3 * i, row_key(0, i)) for i, ids in enumerate(prompts)]


def answer(target: Target, drafter: Drafter, sampling: Sampling, rule: Typical | None = None):
    """Three prompts in two rows, so that one is admitted while the other drafts."""
    decoded = decode_batch(target, drafter, make_requests(), sampling, rule, rows=2)
    return [(g.output_ids, [(r.drafted, r.accepted) for r in g.rounds]) for g in decoded.generations]


def drafter_of(head: DraftHead, tree: StaticTree | None) -> Drafter:
    make = methods()[head.method].make_drafter
    return make(head, 3) if tree is None else make(head, 3, tree=tree)


@pytest.mark.parametrize(
    ("method", "tree", "sampling", "rule"),
    [
        *(pytest.param(*way, None, marks=pytest.mark.slow) for way in WAYS),
        ("medusa", TREE, Sampling(1.0), Typical(0.5, 0.9)),
    ],
    ids=str,
)
def test_decoding(method, tree, sampling, rule):
    target = make_target()
    here = answer(target, drafter_of(make_head(target, method), tree), sampling, rule)
    with far_device():
        far = make_far_target()
        assert answer(far, drafter_of(make_far_head(far, method), tree), sampling, rule) == here


V = 160


def small_model(target: Target) -> Target:
    """A draft model with fewer tokens, on the target's device."""
    model = tiny_model("llama", num_hidden_layers=2, seed=1, vocab_size=V - 16)
    return Target(move_module(model) if target.device.type != "cpu" else model, path="tiny", fingerprint="0")


def known(target: Target) -> Drafter:
    found = decode_batch(make_target(), TargetAlone(), make_requests(), Sampling()).generations
    return KnownAcceptance({g.request.prompt_ids: g.output_ids for g in found}, 0.6, 3, V)


HEADLESS: dict[str, Callable[[Target], Drafter]] = {
    "prompt lookup": lambda target: PromptLookup(3),
    "suffix tree": lambda target: SuffixDecoding(4, SuffixRules(alpha=2, tree=True), Outputs([[5, 7, 9]])),
    "lookahead": lambda target: Lookahead(3, 3, 2),
    "draft model": lambda target: DraftModel(target, 3, V),
    "smaller vocabulary": lambda target: DraftModel(small_model(target), 3, V),
}


@pytest.mark.parametrize(
    ("make", "sampling"),
    [
        *(pytest.param(make, one, marks=pytest.mark.slow) for make in HEADLESS.values() for one in SAMPLINGS),
        (known, Sampling()),
    ],
)
def test_decoding_without_a_head(make, sampling):
    target = make_target()
    here = answer(target, make(target), sampling)
    with far_device():
        far = make_far_target()
        assert answer(far, make(far), sampling) == here
    assert make is not known or any(accepted for _, rounds in here for _, accepted in rounds)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_simulation_of_a_draft_model(sampling):
    texts = decode_batch(make_target(), TargetAlone(), make_requests(), sampling).generations

    def simulate(target: Target) -> list[float]:
        found = draft_model_simulator(small_model(target))(target, texts, sampling, 3)
        return [tally.rounds for by_k in found.tallies for tally in by_k]

    here = simulate(make_target())
    with far_device():
        assert simulate(make_far_target()) == pytest.approx(here, rel=1e-5)


@pytest.mark.parametrize(("method", "tree", "sampling"), WAYS, ids=str)
@pytest.mark.slow
def test_simulation(method, tree, sampling):
    texts = decode_batch(make_target(), TargetAlone(), make_requests(), sampling).generations

    def simulate(target: Target, head: DraftHead) -> list[float]:
        found = simulate_generations(target, head, texts, sampling, 3, tree=tree)
        return [tally.rounds for by_k in found.tallies for tally in by_k]

    target = make_target()
    here = simulate(target, make_head(target, method))
    with far_device():
        far = make_far_target()
        assert simulate(far, make_far_head(far, method)) == pytest.approx(here, rel=1e-5)


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize(
    "spec",
    [
        LossSpec("lk_hybrid", normalize="sequence"),
        pytest.param(LossSpec(), marks=pytest.mark.slow),
        pytest.param(LossSpec("hard_ce"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_step(method, spec):
    target = make_target()
    features = compute_features(target, make_texts(6, 10), LAYERS, torch.float32)
    batch = collate([features[:2], features[2:]], 100)

    def step(target: Target, head: DraftHead) -> tuple[float, list[torch.Tensor]]:
        there = batch.to(target.device)
        loss = head_loss(head(there, 3), there, target.head, head.draft_vocab, spec)
        loss = loss.loss_sum / loss_divisor(there, spec, head)
        loss.backward()
        return loss.item(), [p.grad.cpu() for p in head.parameters() if p.grad is not None]

    loss, gradients = step(target, make_head(target, method))
    with far_device():
        far = make_far_target()
        far_loss, far_gradients = step(far, make_far_head(far, method))
    assert far_loss == pytest.approx(loss, rel=1e-5)
    assert len(far_gradients) == len(gradients) > 0
    for ours, theirs in zip(gradients, far_gradients, strict=True):
        torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=1e-4)


def test_extraction_and_held_out_answers():
    def look(target: Target, head: DraftHead) -> list[float]:
        data = make_data(target, make_texts(8, 10))
        plan = make_heldout_batches(data.source, data.heldout, 64, 2)
        held = evaluate_heldout(head, data.source, plan, 64, target.head, LossSpec(), Sampling(1.0), 3)
        return [held.loss, held.tau, held.chance, *held.accuracy, *held.acceptance]

    target = make_target()
    here = look(target, make_head(target, "eagle3"))
    states = torch.randn(300, target.hidden_size, generator=torch.Generator().manual_seed(0))
    top1, _ = summarise_logits(target.head, states)
    with far_device() as device:
        far = make_far_target()
        assert look(far, make_far_head(far, "eagle3")) == pytest.approx(here, rel=1e-5)
        far_top1, _ = summarise_logits(far.head, states.to(device))
        assert far_top1.device == device
        assert torch.equal(far_top1.cpu(), top1)


def test_self_checks():
    with far_device():
        check_target(make_far_target())
        check_decoding(make_far_target())


def test_a_tensor_left_behind_is_found():
    with far_device() as device:
        x = torch.arange(4, device=device)
        with pytest.raises(RuntimeError, match="one device"):
            x + torch.arange(4)
        with pytest.raises(RuntimeError, match="one device"):
            torch.arange(4)[x]
        assert x[torch.arange(2)].tolist() == [0, 1], "a GPU's tensor takes indices from the CPU"
        assert (x + torch.tensor(1)).device == device
        assert x.cpu().device.type == "cpu"
