"""The target's passes as CUDA graphs: every length has the same operations on the same memory, no masks or copies of keys for chains;
a pass that cannot be captured runs kernel by kernel."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.memory import tensors_of
from draftsmith.decoder import graphs, slots
from draftsmith.decoder.answers import Request
from draftsmith.decoder.cache import KVCache
from draftsmith.decoder.captured import Passes
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import Draft, TargetAlone
from draftsmith.decoder.graphs import Graphs
from draftsmith.decoder.sampling import Noise, Sampling
from draftsmith.decoder.slots import run_draft
from draftsmith.decoder.trees import DynamicTree, StaticTree
from draftsmith.heads.registry import methods
from draftsmith.target.target import Target, TargetOutput
from tests.gpu.support import make_head, make_target
from tests.pretended_gpu.cuda import pretended_gpu
from tests.pretended_gpu.graphs import Graph

PARENTS = {"one token": [-1], "a chain": [-1, 0, 1, 2], "a tree": [-1, 0, 0, 1, 3]}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(graphs, "EAGER", 0)
    with pretended_gpu() as device:
        yield device


def bf16_target(**options: Any) -> Target:
    return make_target(dtype=torch.bfloat16, num_hidden_layers=4, **options)


def draft_of(shape: str, rows: int) -> Draft:
    parents = PARENTS[shape]
    tokens = torch.randint(
        3, 150, (rows, len(parents)), generator=torch.Generator().manual_seed(1), device="cpu"
    ).cuda()
    if shape != "a tree":
        return Draft.chain(tokens[:, 0], tokens[:, 1:])
    return Draft(tokens, torch.tensor([parents] * rows).cuda(), torch.full((rows,), len(parents)).cuda(), linear=False)


def filled(cache: KVCache, lengths: list[int]) -> None:
    """Let rows hold random keys and values, as if so many tokens had been read."""
    cache.restart()
    for buffer in cache.buffers.values():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(2), device="cpu"))
    cache.append(torch.tensor(lengths).cuda())


def by_transformers(target: Target, cache: KVCache, draft: Draft, longest: int) -> TargetOutput:
    plain, target.plain_pass = target.plain_pass, None
    try:
        return run_draft(target, cache, draft, (1, 3), longest=longest)
    finally:
        target.plain_pass = plain


def far_from(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


CASES: list[tuple[str, int, int | None, torch.dtype]] = [
    ("one token", 1, None, torch.bfloat16),
    ("a chain", 2, None, torch.bfloat16),
    ("a chain", 2, 6, torch.bfloat16),
    ("a tree", 2, None, torch.bfloat16),
    ("a chain", 1, 6, torch.float32),  # under a mask
    ("a tree", 2, 6, torch.float32),
]


@pytest.mark.parametrize(("shape", "rows", "window", "dtype"), CASES)
def test_passes_say_what_transformers_does(
    gpu: Any, shape: str, rows: int, window: int | None, dtype: torch.dtype
) -> None:
    target = make_target(dtype=dtype, num_hidden_layers=4)
    target.config.sliding_window = window
    passes, draft = Passes.of(target, rows, 40, 5), draft_of(shape, rows)
    close = 1e-5 if dtype == torch.float32 else 0.05
    for length in (20, 31):
        filled(passes.cache, [length, 9][:rows])
        theirs = by_transformers(target, passes.cache, draft, length)
        alone = run_draft(target, passes.cache, draft, (1, 3), longest=length)
        made = passes(draft, length, (1, 3))
        assert far_from(made.output.last, theirs.last) < close
        assert far_from(made.output.aux, theirs.aux) < close
        for ours, same in ((made.output.last, alone.last), (made.output.aux, alone.aux)):
            assert torch.equal(ours.cpu(), same.cpu()), "a graph computes what its kernels compute one by one"
    assert len(passes._graphs.held) == 1


def recorded(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[Any]]:
    """Run the bodies of graphs on memory of their own, and return the operations of each run by key."""
    found, kept = defaultdict(list), {}

    def run(self: Graphs, key: Any, body: Any, *given: Tensor, noise: Noise | None = None) -> Any:
        key = (self._what, key, *((x.shape, x.stride()) for x in given))
        if key not in kept:
            held = None if noise is None else graphs._Held(noise.keys_B, noise.counter_B, noise.table, noise.counter)
            kept[key] = [x.clone() for x in given], held
            body(held, *kept[key][0])
        mine, held = kept[key]
        for x, other in zip(mine, given, strict=True):
            x.copy_(other)
        if held is not None and noise is not None:
            held.copy_(noise)
        with gpu.record() as recording:
            made = body(held, *mine)
        found[key].append(recording.operations)
        return made

    monkeypatch.setattr(Graphs, "run", run)
    return found


@pytest.mark.parametrize("shape", PARENTS)
def test_every_length_has_the_same_operations_on_the_same_memory(
    gpu: Any, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bf16_target()
    passes, draft = Passes.of(target, 1, 400, 5), draft_of(shape, 1)
    # Under a mask only lengths up to the same multiple of 256 are alike.
    lengths, tree = (20, 37, 300), shape == "a tree"
    found = recorded(gpu, monkeypatch)
    for length in lengths:
        filled(passes.cache, [length])
        passes(draft, 300 if tree else length, (1,))
    ((first, second, third),) = found.values()
    assert first == second == third
    if not tree:
        assert "torch.bool" not in str(first), "no mask"
        keys = 4 * 4 * 16  # of all query heads, in as many slots as are used: what transformers would copy
        assert not [
            one for one in first if one[0] in ("clone", "repeat_interleave", "expand") and str(keys) in str(one)
        ]


DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "peagle": {},
    "hydra": {},
    "medusa": {},
    "dflash": {},
    "eagle3, a tree": {"tree": StaticTree.of("few", [[0], [1], [0, 0]])},
    "eagle3, a beam": {"tree": DynamicTree(2, 2, 5)},
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "eagle3" else pytest.mark.slow) for n in DRAFTERS])
def test_every_length_has_the_same_rounds(gpu: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft, pass and verdict behind 20, 37 and 300 tokens."""
    target = make_target(dtype=torch.bfloat16, max_position_embeddings=512)
    method, options = name.split(",")[0], DRAFTERS[name]
    head = make_head(target, method).to(target.dtype).eval()
    drafter = methods()[method].make_drafter(head, 2, **options)
    asked = [Request(str(n), "", tuple(3 + i % 150 for i in range(n)), 12, n, ignore_eos=True) for n in (20, 37, 300)]
    found = recorded(gpu, monkeypatch)
    for module in ("decoder.captured", "decoder.slots", "heads.drafters"):
        monkeypatch.setattr(
            f"draftsmith.{module}.BUCKET", 512
        )  # under a mask only lengths up to the same multiple are alike
    answers = decode_batch(target, drafter, asked, Sampling(1.0), rows=1).generations
    rounds = sum(len(answer.rounds) for answer in answers)
    for what in ("drafts", "the target's passes", "verdicts"):
        runs = {key: lists for key, lists in found.items() if key[0] == what}
        assert sum(map(len, runs.values())) == rounds, "all work of a round is captured"
        assert all(one == lists[0] for lists in runs.values() for one in lists)
        assert max(map(len, runs.values())) >= 3, "graphs that all three lengths share"


def test_a_layer_takes_few_kernels(gpu: Any) -> None:
    found = {}
    for layers in (2, 6):
        target = make_target(dtype=torch.bfloat16, num_hidden_layers=layers)
        cache = KVCache.for_target(target, 1, 64)
        for shape in PARENTS:
            draft = draft_of(shape, 1)
            filled(cache, [20])
            run_draft(target, cache, draft, longest=20)
            gpu.counts.clear()
            run_draft(target, cache, draft, longest=20)
            found[shape, layers] = sum(gpu.counts.kernels.values())
            assert not gpu.counts.waits
    per_layer = {shape: (found[shape, 6] - found[shape, 2]) / 4 for shape in PARENTS}
    assert per_layer == {"one token": 14, "a chain": 14, "a tree": 16}


def requests(rows: int, tokens: int = 12) -> list[Request]:
    return [Request(str(i), "", tuple(range(5 + i, 25)), tokens, ignore_eos=True) for i in range(rows)]


def texts_of(target: Target, asked: list[Request]) -> list[list[int]]:
    return [answer.output_ids for answer in decode_batch(target, TargetAlone(), asked, Sampling()).generations]


def test_graphs_and_buffers_stay_from_batch_to_batch(gpu: Any) -> None:
    target = bf16_target()
    first = texts_of(target, requests(2))
    kept = target.kept_passes
    held = list(kept._graphs.held.values())
    assert texts_of(target, requests(2)) == first
    assert target.kept_passes is kept
    assert list(kept._graphs.held.values()) == held, "none was captured again"
    # A batch of other rows has its own.
    assert texts_of(target, requests(1)) == first[:1]
    assert target.kept_passes is not kept


def bytes_of_outputs(passes: Passes) -> int:
    """Bytes of the device that graphs keep for what they return."""
    found = {x.memory: x.memory.size for graph in passes._graphs.held.values() for x in tensors_of(graph.made)}  # type: ignore[attr-defined]
    return sum(found.values())


def test_graphs_of_all_shapes_share_the_memory_of_their_outputs(gpu: Any) -> None:
    target = bf16_target()
    passes = Passes.of(target, 2, 40, 5)
    for shape in (*PARENTS, *PARENTS):
        draft = draft_of(shape, 2)
        filled(passes.cache, [20, 9])
        alone = run_draft(target, passes.cache, draft, (1, 3), longest=20)
        made = passes(draft, 20, (1, 3))
        for ours, same in zip(
            (made.output.aux, made.output.last, made.logits_BNV),
            (alone.aux, alone.last, target.head.logits(alone.last)),
            strict=True,
        ):
            assert torch.equal(ours.cpu(), same.cpu()), shape
    assert len(passes._graphs.held) == 3
    # fp32 logits, bf16 states of two layers and the last, of two rows of five nodes
    assert bytes_of_outputs(passes) == 2 * 5 * (4 * target.vocab_size + 2 * 3 * target.hidden_size)


def test_a_shape_that_is_rare_is_not_captured(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "EAGER", 2)
    passes, found = Passes.of(bf16_target(), 1, 40, 5), []
    for shape in ("a chain", "one token", "a chain", "a chain", "a chain"):
        filled(passes.cache, [20])
        gpu.counts.clear()
        passes(draft_of(shape, 1), 20)
        found.append(any(name == "graph" for _, name, _ in gpu.counts.kernels))
    assert found == [False, False, False, True, True]


def test_rows_that_leave_have_graphs_of_their_own(gpu: Any) -> None:
    target = bf16_target()
    asked = [Request(str(i), "", tuple(range(5, 25)), 4 + 12 * (i == 3), ignore_eos=True) for i in range(4)]
    together = texts_of(target, asked)
    held = dict(target.kept_passes._graphs.held)
    assert {key[0] for key in held} == {4, 1}
    assert together[3][:4] == together[0]
    assert texts_of(target, asked) == together
    assert target.kept_passes._graphs.held == held, "the next batch captures none again"


def test_graphs_that_ran_last_are_held(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    target = bf16_target()
    passes = Passes.of(target, 2, 40, 5)
    seen = []
    for shape in ("one token", "a chain", "one token", "a tree", "one token", "a chain"):
        filled(passes.cache, [20, 9])
        draft = draft_of(shape, 2)
        alone = run_draft(target, passes.cache, draft, (), longest=20)
        before = set(passes._graphs.held)
        assert torch.equal(passes(draft, 20).output.last.cpu(), alone.last.cpu()), shape
        assert len(passes._graphs.held) <= 2
        seen.append(bool(set(passes._graphs.held) - before))
    assert seen == [True, True, False, True, False, True], "captured anew"


def test_a_pass_that_cannot_be_captured_runs_kernel_by_kernel(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    target = bf16_target()
    expected = texts_of(target, requests(1))

    def fails(self: Graph, stream: Any = None) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Graph, "capturing", fails)
    target.kept_passes = None
    assert texts_of(target, requests(1)) == expected
    said = capfd.readouterr()
    for what in ("the target's passes", "verdicts"):
        sentence = f"{what} cannot be captured as CUDA graphs (CUDA error: operation not permitted when stream is "
        assert (said.out + said.err).count(sentence) == 1


def test_a_kernel_that_reads_no_lengths_is_not_relied_on(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slots.reads_lengths.cache_clear()
    flash = slots._flash

    def forgets(*arguments: Any, seqused_k: Tensor, **options: Any) -> Any:
        return flash(*arguments, seqused_k=torch.full_like(seqused_k, 12), **options)

    forgets.default = flash.default  # type: ignore[attr-defined]
    monkeypatch.setattr(slots, "_flash", forgets)
    target = bf16_target()
    passes = Passes.of(target, 1, 40, 5)
    filled(passes.cache, [20])
    theirs = by_transformers(target, passes.cache, draft_of("a chain", 1), 20)
    assert far_from(passes(draft_of("a chain", 1), 20, (1, 3)).output.last, theirs.last) < 0.05
    slots.reads_lengths.cache_clear()
    said = capfd.readouterr()
    assert "does not read the lengths of cached keys here (its numbers are others)" in said.out + said.err
