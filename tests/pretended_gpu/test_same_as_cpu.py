"""On a pretended GPU everything decodes, trains and measures what it does on the CPU, and nothing meets what was left there."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.data.batch import collate
from draftsmith.data.features.extract import compute_features, extract, summarise_logits
from draftsmith.decoder import graphs, slots
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
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.decoder.verify import Typical
from draftsmith.errors import UserError
from draftsmith.eval.simulate.texts import draft_model_simulator, head_simulator
from draftsmith.heads.base import DraftHead
from draftsmith.heads.losses.head_loss import head_loss, loss_divisor
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import methods
from draftsmith.target.pretrained import check_target
from draftsmith.target.target import Target
from draftsmith.train.loop import train
from draftsmith.train.metrics import evaluate_heldout, make_heldout_batches
from draftsmith.train.schedule import TrainData
from tests.gpu.support import LAYERS, OPTIONS, make_data, make_head, make_recipe, make_target, make_texts
from tests.pretended_gpu.cuda import forget_accelerator, pretended_gpu

pytestmark = pytest.mark.full

TREE = StaticTree.of("few", [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
# The target that Medusa-2 tunes is another one.
CHAINS = sorted(set(OPTIONS) - {"medusa2"})
DRAFTS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "the target alone": (None, {}),
    **{method: (method, {}) for method in CHAINS},
    **{f"{method}, static tree": (method, {"tree": TREE}) for method in ("eagle3", "medusa", "hydra")},
    "eagle3, dynamic tree": ("eagle3", {"tree": DynamicTree(3, 4, 16)}),
    **{f"{method}, drawn tree": (method, {"tree": TREE, "drawn": True}) for method in ("eagle3", "medusa")},
}
V = 160
HEADLESS: dict[str, Callable[[Target], Drafter]] = {
    "prompt lookup": lambda target: PromptLookup(3),
    "suffix tree": lambda target: SuffixDecoding(4, SuffixRules(alpha=2, tree=True), Outputs([[5, 7, 9]])),
    "lookahead": lambda target: Lookahead(3, 3, 2),
    "a draft model": lambda target: DraftModel(target, 3, V),
    "a smaller vocabulary": lambda target: DraftModel(small_model(target), 3, V),
    "known acceptance": lambda target: KnownAcceptance(alone(), 0.6, 3, V),
}
SAMPLINGS = {"T=0": Sampling(), "T=0.8": Sampling(0.8, top_k=30, top_p=0.9, repetition_penalty=1.2)}


def variants(names: list[str], quick: str) -> list[Any]:
    """All but one are left to CI."""
    return [name if name == quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def small_model(target: Target) -> Target:
    """A draft model with fewer tokens, on the target's device."""
    return make_target(target.device, num_hidden_layers=2, seed=1, vocab_size=V - 16)


def alone() -> dict[tuple[int, ...], list[int]]:
    """The target's own answers."""
    found = decode_batch(make_target("cpu"), TargetAlone(), make_requests(), Sampling()).generations
    return {g.request.prompt_ids: g.output_ids for g in found}


def head_of(target: Target, method: str) -> DraftHead:
    vocab = torch.arange(0, target.vocab_size, 2, device=target.device) if method == "eagle3" else None
    return make_head(target, method, vocab).eval()


def make_requests() -> list[Request]:
    prompts = [[5, 7, 9, 5, 7], [5, 7, 9, 11, 30, 80], [4, 4, 4]]
    return [Request(f"p{i}", "a", tuple(ids), 5 + 3 * i, row_key(0, i)) for i, ids in enumerate(prompts)]


def answer(device: str, name: str, sampling: Sampling, rule: Typical | None = None) -> list[Any]:
    """Decode three prompts in two rows, so that one waits, and is read while the other row drafts."""
    target = make_target(device)
    method, options = DRAFTS.get(name, (None, {}))
    drafter = HEADLESS[name](target) if name in HEADLESS else TargetAlone()
    if method:
        drafter = methods()[method].make_drafter(head_of(target, method), 3, **options)
    decoded = decode_batch(target, drafter, make_requests(), sampling, rule, rows=2)
    return [(g.output_ids, [(r.drafted, r.accepted) for r in g.rounds]) for g in decoded.generations]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", variants([*DRAFTS, *HEADLESS], "eagle3, dynamic tree"))
def test_decoding(name: str, sampling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = answer("cpu", name, SAMPLINGS[sampling])
    monkeypatch.setattr(graphs, "EAGER", 0)  # graphs from the first round on
    with pretended_gpu():
        assert answer("cuda", name, SAMPLINGS[sampling]) == here


def test_typical_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ("medusa, static tree", Sampling(1.0), Typical(0.5, 0.9))
    here = answer("cpu", *case)
    monkeypatch.setattr(graphs, "EAGER", 0)
    with pretended_gpu():
        assert answer("cuda", *case) == here


SIMULATED = [name for name, (method, _) in DRAFTS.items() if method and not ("dynamic" in name or "drawn" in name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SIMULATED, "a smaller vocabulary"])
def test_simulation(name: str) -> None:
    (method, options), sampling = DRAFTS.get(name, (None, {})), SAMPLINGS["T=0.8"]
    texts = decode_batch(make_target("cpu"), TargetAlone(), make_requests(), sampling).generations

    def simulate(device: str) -> list[float]:
        target = make_target(device)
        if method:
            found = head_simulator(head_of(target, method), tree=options.get("tree"))(target, texts, sampling, 3)
        else:
            found = draft_model_simulator(small_model(target))(target, texts, sampling, 3)
        return [tally.rounds for by_k in found.tallies for tally in by_k]

    here = simulate("cpu")
    with pretended_gpu():
        assert simulate("cuda") == pytest.approx(here, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", variants(list(OPTIONS), "eagle3"))
def test_a_training_step(method: str, precision: str) -> None:
    target, half = make_target("cpu"), precision == "bf16"
    features = compute_features(target, make_texts(6, 10), LAYERS, torch.float32)
    batch, spec = collate([features[:2], features[2:]], 100), LossSpec("lk_hybrid", normalize="sequence")

    def step(target: Target) -> tuple[float, dict[str, torch.Tensor]]:
        there, head = batch.to(target.device), head_of(target, method).train()
        with torch.autocast(target.device.type, torch.bfloat16, enabled=half):
            output = head(there, 3)
        loss = head_loss(output, there, target.head, head.draft_vocab, spec).loss_sum / loss_divisor(there, spec, head)
        loss.backward()
        return loss.item(), {n: p.grad.cpu().float() for n, p in head.named_parameters() if p.grad is not None}

    loss, gradients = step(target)
    with pretended_gpu():
        far_loss, far_gradients = step(make_target("cuda"))
    # In bf16 the device takes its flash kernel, and autocast keeps other operations in fp32.
    assert far_loss == pytest.approx(loss, rel=1e-2 if half else 1e-5)
    assert far_gradients.keys() == gradients.keys() != set()
    for name, gradient in gradients.items():
        assert (far_gradients[name] - gradient).norm() <= (0.1 if half else 1e-4) * gradient.norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("source", ["store", "online"])
def test_the_training_loop(source: str, tmp_path: Any) -> None:
    recipe = make_recipe(epochs=2)
    recipe = replace(recipe, train=replace(recipe.train, optimizer="adamw", max_steps=6, evaluations=2))

    def run(device: str) -> list[Any]:
        target, texts, folder = make_target(device), make_texts(), tmp_path / device
        data = make_data(target, texts)
        if source == "store":
            data = TrainData(extract(target, texts, folder / "features", layer_ids=LAYERS), data.train, data.heldout)
        train(recipe, target, head_of(target, "eagle3"), data, folder / "train")
        lines = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
        names = sorted(path.relative_to(folder).as_posix() for path in (folder / "train").rglob("*"))
        return [names, [(line["loss"], *line["accuracy"], line.get("tau", {}).get("overall", 0)) for line in lines]]

    forget_accelerator()
    names, here = run("cpu")
    with pretended_gpu():
        far_names, there = run("cuda")
    assert {name.split("/")[1] for name in far_names if "/" in name} >= {
        "best",
        "metrics.jsonl",
        "summary.json",
        "step_6",
    }
    assert far_names == names
    assert len(there) == len(here) == 6
    for ours, theirs in zip(here, there, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-6)


def test_extraction_and_held_out_answers() -> None:
    def look(device: str) -> list[float]:
        target = make_target(device)
        data = make_data(target, make_texts(8, 10))
        plan, head = make_heldout_batches(data.source, data.heldout, 64, 2), head_of(target, "eagle3")
        held = evaluate_heldout(head, data.source, plan, 64, target.head, LossSpec(), Sampling(1.0), 3)
        return [held.loss, held.tau, held.chance, *held.accuracy, *held.acceptance]

    here, target = look("cpu"), make_target("cpu")
    states = torch.randn(300, target.hidden_size, generator=torch.Generator().manual_seed(0))
    top1, _ = summarise_logits(target.head, states)
    with pretended_gpu():
        assert look("cuda") == pytest.approx(here, rel=1e-5)
        far_top1, _ = summarise_logits(make_target("cuda").head, states.cuda())
        assert far_top1.is_cuda
        assert torch.equal(far_top1.cpu(), top1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_self_checks(dtype: torch.dtype) -> None:
    with pretended_gpu():
        check_target(make_target("cuda", dtype))
        check_decoding(make_target("cuda", dtype))


def test_a_wrong_kernel_for_chains_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was right when it was tried: its error must not widen the limit of rounding either."""
    real = slots._flash_of
    with pretended_gpu():
        target = make_target("cuda", torch.bfloat16)
        slots.reads_lengths(target.device, target.dtype, target.config.head_dim)
        monkeypatch.setattr(slots, "_flash_of", lambda *args: real(*args) * 2)
        with pytest.raises(UserError, match="differ from those of a plain forward"):
            check_decoding(target)
