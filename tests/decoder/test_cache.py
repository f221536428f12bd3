"""The KV cache against slow oracles: a list of tokens per row, a gather in Python, a mask entry by entry."""

import ast
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.decoder.cache import KVCache, LayerShape, TensorShape, build_mask, run_draft
from draftsmith.decoder.draft import Draft
from draftsmith.decoder.loop import Loop
from draftsmith.decoder.trees import DynamicTree
from draftsmith.heads.eagle.drafter import EagleDrafter
from tests.decoder.test_decode import GREEDY, make_requests, make_target, trained
from tests.models import KINDS

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "draftsmith/decoder/cache.py"
PRODUCT = ("data", "heads", "train", "eval", "scripts", "draftsmith")
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
                place = cache.layers[layer].places[part]
                slots = cache.buffers[kind][place.number]
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
    path = [rng.randrange(int(draft.count_B[row]))]
    while path[0]:
        path.insert(0, int(draft.parents_BN[row, path[0]]))
    return path


def padded(paths: list[list[int]]) -> Tensor:
    longest = max(1, *map(len, paths))
    return torch.tensor([[*path, *[-1] * (longest - len(path))] for path in paths])


def forward(cache: KVCache, tokens_BN: Tensor, rows_b: Tensor | None = None) -> None:
    cache.stage(tokens_BN.shape[1], rows_b)
    write(cache, tokens_BN)


@pytest.mark.parametrize("rows", [1, 3])
def test_append_keeps_the_first_entries_of_a_forward(rows: int) -> None:
    cache, tokens = KVCache(SHAPES, rows, 12), torch.arange(rows * 4).view(rows, 4)
    forward(cache, tokens)
    check(cache, [[] for _ in range(rows)])
    counts = [4, 2, 0][:rows]
    cache.append(torch.tensor(counts))
    texts = [row[:n] for row, n in zip(tokens.tolist(), counts, strict=True)]
    check(cache, texts)
    forward(cache, tokens + 50)
    cache.append(3)
    check(cache, [text + row[:3] for text, row in zip(texts, (tokens + 50).tolist(), strict=True)])


def test_append_to_some_rows_leaves_the_others() -> None:
    cache = KVCache(SHAPES, 3, 12)
    forward(cache, torch.tensor([[1, 2], [3, 4], [5, 6]]))
    cache.append(2)
    rows = torch.tensor([2, 0])
    cache.rollback(torch.tensor([0, 1]), rows)
    forward(cache, torch.tensor([[7, 8, 9], [10, 11, 12]]), rows)
    cache.append(torch.tensor([3, 1]), rows)
    check(cache, [[1, 10], [3, 4], [7, 8, 9]])


def test_rollback_makes_no_row_longer() -> None:
    cache = KVCache(SHAPES, 3, 8)
    forward(cache, torch.arange(12).view(3, 4))
    cache.append(torch.tensor([4, 2, 3]))
    cache.rollback(torch.tensor([1, 4, 0]))
    check(cache, [[0], [4, 5], []])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_commit_equals_a_slow_gather(chain: bool, rows: int) -> None:
    rng = random.Random(rows)
    for _ in range(20):
        cache, prompts = KVCache(SHAPES, rows, 24), torch.randint(100, (rows, 5))
        forward(cache, prompts)
        lengths = [rng.randrange(1, 6) for _ in range(rows)]
        cache.append(torch.tensor(lengths))
        draft = random_tree(rng, rows, 7)
        draft = Draft.chain(draft.tokens_BN[:, 0], draft.tokens_BN[:, 1:], draft.count_B - 1) if chain else draft
        forward(cache, draft.tokens_BN)
        before = {kind: buffer.clone() for kind, buffer in cache.buffers.items()}
        paths = [random_path(rng, draft, row) if rng.random() < 0.8 else [] for row in range(rows)]
        cache.commit(draft, padded(paths), torch.tensor([*map(len, paths)]) if rng.random() < 0.5 else None)
        for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
            for kind, buffer in cache.buffers.items():
                assert torch.equal(buffer[:, row, :, :length], before[kind][:, row, :, :length])
                for place, node in enumerate(path):
                    expected = before[kind][:, row, :, length + node]
                    assert torch.equal(buffer[:, row, :, length + place], expected)
        texts = [
            prompts[row, :length].tolist() + draft.tokens_BN[row, path].tolist()
            for row, (length, path) in enumerate(zip(lengths, paths, strict=True))
        ]
        check(cache, texts)


def test_select_permutes_rows_and_changes_no_length() -> None:
    cache = KVCache(SHAPES, 4, 8)
    forward(cache, torch.arange(16).view(4, 4))
    cache.append(torch.tensor([4, 1, 0, 2]))
    cache.select(torch.tensor([3, 0]))
    check(cache, [[12, 13], [0, 1, 2, 3]])
    forward(cache, torch.tensor([[20], [21]]))
    cache.append(1)
    check(cache, [[12, 13, 20], [0, 1, 2, 3, 21]])


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_equal_a_list_of_tokens(seed: int) -> None:
    """Prompts, drafts, roll backs and leaving rows in any order."""
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
        forward(cache, tree.tokens_BN)
        paths = [random_path(rng, tree, row) if rng.random() < 0.8 else [] for row in range(rows)]
        cache.commit(tree, padded(paths))
        for row, path in enumerate(paths):
            texts[row] += tree.tokens_BN[row, path].tolist()

    def grow() -> None:
        """As a drafter: new tokens are read, then a level of drafts behind them is written and forgotten."""
        tokens, counts = torch.randint(100, (rows, 3)), [rng.randrange(4) for _ in range(rows)]
        forward(cache, tokens)
        cache.append(torch.tensor(counts))
        cache.stage(2, skip=1)
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


def test_more_entries_than_slots_are_noticed() -> None:
    with pytest.raises(AssertionError, match="9 slots, but the cache has 8"):
        KVCache(SHAPES, 1, 8).stage(9)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_shapes_share_one_buffer(kind: str) -> None:
    cache = KVCache.for_target(make_target(kind), 2, 10)
    assert [buffer.shape[:2] for buffer in cache.buffers.values()] == [(16, 2)]


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


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_chain_behind_a_cached_prefix_is_read_as_the_whole_text_is(kind: str) -> None:
    """With fused attention and with eager attention, which takes another kind of mask."""
    target = make_target(kind)
    cache, ids = KVCache.for_target(target, 2, 20), torch.randint(5, 150, (2, 12))
    run_draft(target, cache, Draft.chain(ids[:, 0], ids[:, 1:6]))
    cache.append(6)
    found = run_draft(target, cache, Draft.chain(ids[:, 6], ids[:, 7:])).last
    torch.testing.assert_close(found, target.forward(ids).last[:, 6:], atol=1e-4, rtol=1e-4)


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


def test_lengths_are_read_only_outside() -> None:
    cache = KVCache(SHAPES, 2, 8)
    with pytest.raises(AttributeError):
        cache.lengths_B = torch.zeros(2)


def writes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what assigns to an attribute `lengths_B` or `_lengths_B`, or changes one in place."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else ():
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            inner = [part.value if isinstance(part, ast.Subscript) else part for part in parts]
            if any(isinstance(part, ast.Attribute) and part.attr in ("lengths_B", "_lengths_B") for part in inner):
                yield node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, method = node.func.value, node.func.attr
            changed = isinstance(owner, ast.Attribute) and owner.attr in ("lengths_B", "_lengths_B")
            if changed and method.endswith("_"):
                yield node
            if method == "__setattr__" and "lengths_B" in ast.unparse(node):
                yield node


def test_the_three_writers_alone_write_lengths() -> None:
    """`append`, `commit` and `rollback`; the constructor makes them and `select` permutes them."""
    files = [path for room in PRODUCT for path in (ROOT / room).rglob("*.py") if path.resolve() != CACHE]
    assert not [path for path in files if any(writes(ast.parse(path.read_text(encoding="utf-8"))))]
    tree = ast.parse(CACHE.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert {f.name for f in functions if any(writes(f))} == {
        "__init__",
        "append",
        "commit",
        "rollback",
        "select",
    }


@pytest.mark.parametrize(
    "line",
    [
        "cache.lengths_B = x",
        "cache.lengths_B[0] = 1",
        "self.cache._lengths_B += 1",
        "a, cache.lengths_B = x, y",
        "cache.lengths_B.fill_(0)",
        "object.__setattr__(cache, '_lengths_B', x)",
    ],
)
def test_the_check_finds_a_writer(line: str) -> None:
    assert any(writes(ast.parse(line)))
    assert not any(writes(ast.parse("lengths_B = cache.lengths_B.clamp(max=3)")))
