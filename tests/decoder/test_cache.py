"""The KV cache against slow oracles: a list of tokens per row, a gather in Python, a mask entry by entry."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.decoder import slots
from draftsmith.decoder.cache import KVCache, LayerShape, TensorShape, build_mask
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.slots import run_draft
from draftsmith.decoder.trees import DynamicTree
from draftsmith.heads.eagle.base import EagleDrafter
from tests.decoder.test_decode import GREEDY, make_requests, make_target, trained
from tests.models import KINDS

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "draftsmith/decoder/cache.py"
SMALL = TensorShape(2, 3, torch.float32)
WIDE = TensorShape(1, 4, torch.float32)
SHAPES = (LayerShape(SMALL, SMALL), None, LayerShape(SMALL, WIDE), LayerShape(WIDE, SMALL))
"""Layers of two kinds of tensors, one of which shares another layer's."""


def write(cache: KVCache, tokens_BN: Tensor) -> None:
    """Write what tells the token, the layer, and keys from values, as the layers of a model would."""
    for layer, shape in enumerate(SHAPES):
        if shape is not None:
            keys, values = (
                (tokens_BN[:, None, :, None] + 1000.0 * (2 * layer + part)).expand(-1, kind.heads, -1, kind.dim)
                for part, kind in enumerate(shape)
            )
            cache.write(layer, keys, values)


def check(cache: KVCache, texts: list[list[int]]) -> None:
    """Every row holds its text, in all layers."""
    assert cache.lengths_B.tolist() == [len(text) for text in texts]
    for row, text in enumerate(texts):
        for layer, shape in enumerate(SHAPES):
            for part, kind in enumerate(shape or ()):
                slots = cache.buffers[kind][cache.layers[layer].indices[part][1]]
                expected = torch.tensor(text)[None, :, None] + 1000.0 * (2 * layer + part)
                assert torch.equal(slots[row, :, : len(text)], expected.expand(kind.heads, -1, kind.dim))


def random_tree(rng: random.Random, rows: int, nodes: int) -> Draft:
    """A tree of its own in every row, the last nodes of some of them padding."""
    parents = [[-1, *(rng.randrange(i) for i in range(1, nodes))] for _ in range(rows)]
    tokens = [[rng.randrange(100) for _ in range(nodes)] for _ in range(rows)]
    counts = [rng.randrange(1, nodes + 1) for _ in range(rows)]
    return Draft(torch.tensor(tokens), torch.tensor(parents), torch.tensor(counts))


def random_path(rng: random.Random, draft: Draft, row: int) -> list[int]:
    """A path from the root to any valid node."""
    path = [rng.randrange(int(draft.nodes_B[row]))]
    while path[0]:
        path.insert(0, int(draft.parents_BN[row, path[0]]))
    return path


def padded(paths: list[list[int]]) -> Tensor:
    longest = max(1, *map(len, paths))
    return torch.tensor([[*path, *[-1] * (longest - len(path))] for path in paths])


def forward(cache: KVCache, tokens_BN: Tensor, rows_b: Tensor | None = None) -> None:
    lengths_B = cache.lengths_B if rows_b is None else cache.lengths_B[rows_b]
    cache.stage(tokens_BN.shape[1], int(lengths_B.max()), rows_b)
    write(cache, tokens_BN)


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_equal_a_list_of_tokens(seed: int) -> None:
    """Prompts, drafts (chains and trees), roll backs and leaving rows in any order."""
    rng = random.Random(seed)
    rows, capacity = rng.choice([1, 2, 5]), 40
    cache, texts = KVCache(SHAPES, rows, capacity), [[] for _ in range(rows)]

    def admit() -> None:
        some = rng.sample(range(rows), rng.randrange(1, rows + 1))
        prompts = [[rng.randrange(100) for _ in range(rng.randrange(1, 9))] for _ in some]
        width = max(map(len, prompts))
        rows_b = torch.tensor(some)
        cache.rollback(torch.zeros_like(rows_b), rows_b)
        forward(cache, torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts]), rows_b)
        cache.append(torch.tensor([*map(len, prompts)]), rows_b)
        for row, prompt in zip(some, prompts, strict=True):
            texts[row] = prompt

    def draft() -> None:
        tree = random_tree(rng, rows, rng.randrange(1, 7))
        if rng.random() < 0.4:
            tree = Draft.chain(tree.tokens_BN[:, 0], tree.tokens_BN[:, 1:], tree.nodes_B - 1)
        forward(cache, tree.tokens_BN)
        paths = [random_path(rng, tree, row) if rng.random() < 0.8 else [] for row in range(rows)]
        cache.commit(tree, padded(paths), torch.tensor([*map(len, paths)]))
        for row, path in enumerate(paths):
            texts[row] += tree.tokens_BN[row, path].tolist()

    def grow() -> None:
        """As a drafter: new tokens are read, then a level of drafts behind them is written and forgotten."""
        tokens, counts = torch.randint(100, (rows, 3)), [rng.randrange(4) for _ in range(rows)]
        forward(cache, tokens)
        cache.append(torch.tensor(counts))
        cache.stage(2, int(cache.lengths_B.max()), skip=1)
        write(cache, torch.randint(100, (rows, 2)))
        for row, count in enumerate(counts):
            texts[row] += tokens[row, :count].tolist()

    def roll_back() -> None:
        lengths = [rng.randrange(capacity) for _ in range(rows)]
        cache.rollback(torch.tensor(lengths))
        texts[:] = [text[:n] for text, n in zip(texts, lengths, strict=True)]

    def leave() -> None:
        nonlocal rows
        kept = sorted(rng.sample(range(rows), max(1, rows - 1)))
        cache.select(torch.tensor(kept))
        texts[:] = [texts[row] for row in kept]
        rows = len(kept)

    for _ in range(60):
        if max(map(len, texts)) > capacity - 8:
            roll_back()
            admit()
        rng.choices([admit, draft, grow, roll_back, leave], [3, 6, 6, 2, 1])[0]()
        check(cache, texts)


def test_rows_leave_without_a_second_buffer() -> None:
    cache = KVCache(SHAPES, 8, 64)
    forward(cache, torch.arange(8 * 5).view(8, 5))
    cache.append(5)
    places = {kind: buffer.data_ptr() for kind, buffer in cache.buffers.items()}
    with torch.profiler.profile(profile_memory=True) as found:
        cache.select(torch.tensor([1, 2, 4, 5, 7]))
    assert sum(max(0, event.self_device_memory_usage, event.self_cpu_memory_usage) for event in found.events()) < 1000
    check(cache, [[*range(5 * row, 5 * row + 5)] for row in (1, 2, 4, 5, 7)])
    assert {kind: buffer.data_ptr() for kind, buffer in cache.buffers.items()} == places


def test_more_entries_than_slots_are_noticed() -> None:
    with pytest.raises(AssertionError, match="9 slots, but the cache has 8"):
        KVCache(SHAPES, 1, 8).stage(9, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_shapes_share_one_buffer(kind: str) -> None:
    cache = KVCache.for_target(make_target(kind), 2, 10)
    assert [buffer.shape[:2] for buffer in cache.buffers.values()] == [(16, 2)]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_prompts_are_read_without_a_mask_as_any_text_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and padded at the end beside a longer one, in rows that were used before."""
    target, ids_BL = make_target(kind), torch.randint(3, 150, (2, 20))
    monkeypatch.setattr(slots, "attention_masks", None)
    for rows, rows_b in ((1, None), (2, None), (2, torch.tensor([2, 0]))):
        cache = KVCache.for_target(target, rows if rows_b is None else 3, 24)
        ids_BN, plain = ids_BL[:rows].clone(), target.forward(ids_BL[:rows], layer_ids=(1,))
        ids_BN[1:, 11:] = 0
        for _ in range(2):
            found = run_draft(target, cache, Draft.chain(ids_BN[:, 0], ids_BN[:, 1:]), (1,), rows_b, longest=0)
            for ours, theirs in ((found.last, plain.last), (found.aux, plain.aux)):
                # Experts sum other rows together when a batch is padded, and BLAS rounds by how many rows there are.
                torch.testing.assert_close(ours[0], theirs[0])
                torch.testing.assert_close(ours[1:, :11], theirs[1:, :11])


def slow_mask(lengths: list[int], ancestors: Tensor, visible: int, depth: Tensor, window: int | None) -> Tensor:
    """Entry by entry."""
    rows, queries, nodes = ancestors.shape
    mask = torch.zeros(rows, 1, queries, visible, dtype=torch.bool)
    for b in range(rows):
        for i in range(queries):
            for slot in range(visible):
                j = slot - lengths[b]
                sees = j < 0 or (j < nodes and bool(ancestors[b, i, j]))
                key = slot if j < 0 else lengths[b] + int(depth[b, min(j, nodes - 1)])
                query = lengths[b] + int(depth[b, nodes - queries + i])
                mask[b, 0, i, slot] = sees and (window is None or key > query - window)
    return mask


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("lengths", [[6], [6, 3], [0, 5, 2]], ids=str)
@pytest.mark.parametrize("queries", [5, 2])
def test_masks_equal_the_slow_rule(lengths: list[int], queries: int, window: int | None) -> None:
    """Whole trees, and the last nodes of one (a level that a draft head runs)."""
    for seed in range(5):
        draft = random_tree(random.Random(seed), len(lengths), 5)
        ancestors, visible = draft.ancestors_BNN[:, 5 - queries :], max(lengths) + 5
        found = build_mask(torch.tensor(lengths), ancestors, visible, draft.depth_BN, window)
        assert torch.equal(found, slow_mask(lengths, ancestors, visible, draft.depth_BN, window))


@pytest.mark.parametrize("window", [None, 3])
def test_a_node_sees_only_what_its_mask_says_the_first_node_included(window: int | None) -> None:
    lengths, depth = [6, 3], torch.arange(5).expand(2, 5)
    ancestors = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    found = build_mask(torch.tensor(lengths), ancestors, 11, depth, window)
    assert torch.equal(found, slow_mask(lengths, ancestors, 11, depth, window))


@pytest.mark.parametrize("rows", [1, 3])
def test_every_other_length_derives_from_the_targets_cache(rows: int) -> None:
    """The state's, the host's and the drafter's own, in batches whose rows come and go."""
    target, head = trained()
    requests = [replace(r, max_new_tokens=n) for r, n in zip(make_requests(5), (9, 14, 4, 11, 7), strict=True)]
    drafter = EagleDrafter(head, 4, tree=DynamicTree(4, 3, 12))
    run = Loop(target, drafter, requests, GREEDY, None, rows)
    while run.fill():
        state, active = run.state, [not answer.finish_reason for answer in run.rows]
        lengths = run.cache.lengths_B.tolist()
        assert state.length_B.tolist() == lengths
        assert list(state.host_lengths) == [n for n, runs in zip(lengths, active, strict=True) if runs]
        run.round()
        drafted_from = drafter.cache.lengths_B.tolist()
        assert [n for n, runs in zip(drafted_from, active, strict=True) if runs] == list(state.host_lengths)


def test_the_three_writers_alone_write_lengths() -> None:
    """`append`, `commit` and `rollback`, and `resume` what these counted in a graph; the constructor and `restart` make them, and `select`
    permutes them. No other file knows the attribute, whose property cannot be set."""
    with pytest.raises(AttributeError):
        KVCache(SHAPES, 2, 8).lengths_B = torch.zeros(2)
    rooms = ("data", "heads", "train", "eval", "scripts", "draftsmith")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py") if path.resolve() != CACHE]
    assert not [
        path
        for path in files
        if re.search(r"[._\"']_lengths_B|\.lengths_B(\[.*\] *[-+*/]?=[^=]|\.\w+_\()", path.read_text("utf-8"))
    ]
    methods = re.split(r"\n    def ", CACHE.read_text("utf-8"))
    writing = {
        one.split("(")[0] for one in methods if re.search(r"\._lengths_B( *(\[.*\] *)?[-+*/]?=[^=]|\.\w+_\()", one)
    }
    assert writing == {"__init__", "restart", "append", "commit", "rollback", "resume", "select"}
