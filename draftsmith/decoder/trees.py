"""Shapes of draft trees: static trees, which are the same in every round, and the settings of dynamic ones.

A node of a static tree is named by its path of ranks: (0, 2) is the third most likely token of head 1 after the most
likely token of head 0 (Cai et al., "Medusa", 2024, section 2.1.2).

Shapes: N nodes, node 0 is the root.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.foreign.text import MIB, read_json
from draftsmith.storage import write_text

Choice = tuple[int, ...]

MOST_NODES, MOST_LEVELS = 4096, 64
"""The most nodes and levels of a tree: far beyond what pays, and within what a pass can hold."""


@dataclass(frozen=True)
class TreeTensors:
    """A static tree on a device: parents_N (-1 for the root), depth_N, rank_N (0 for the root), and the bool
    ancestors_NN, True at (i, j) where node j is node i or above it."""

    parents_N: Tensor
    depth_N: Tensor
    rank_N: Tensor
    ancestors_NN: Tensor


@dataclass(frozen=True)
class DynamicTree:
    """The settings of a tree that follows the draft's own confidence.

    Nodes get their `branching` most likely tokens as children, `depth` levels deep, up to `total_tokens` nodes, the root
    included. rule: which nodes there are, by their probability under the draft, that of the whole path.

    - dynamic: the `branching` best of a level get children, of all of which the best are kept (Li et al., "EAGLE-2", 2024,
      section 4). EAGLE's own setting depth=d is depth d + 1 here.
    - best_first: the best of all possible nodes, added one at a time, which has the longest expected draft.
    - accum_logp: the best node gets all its children at once, then the best of all the nodes without any, and so on
      ("JetSpec", 2026).
    """

    depth: int
    branching: int
    total_tokens: int
    rule: str = "dynamic"

    def __post_init__(self) -> None:
        for name, least in (("depth", 1), ("branching", 1), ("total_tokens", 2)):
            if getattr(self, name) < least:
                raise UserError(f"A dynamic tree with {name} {getattr(self, name)}: it must be at least {least}.")

    @property
    def name(self) -> str:
        """The settings, for tables."""
        return f"{self.rule} {self.depth}x{self.branching}, {self.total_tokens} tokens"

    @property
    def beam(self) -> int:
        """The most nodes of a level that may have children: where all nodes may, as many as there can be with any."""
        if self.rule == "dynamic":
            return self.branching
        return self.total_tokens - 1 if self.rule == "best_first" else -(-(self.total_tokens - 1) // self.branching)

    @property
    def max_nodes(self) -> int:
        """Most nodes of a draft, the root included."""
        nodes, level = 1, 1
        for _ in range(self.depth):
            candidates = level * self.branching
            nodes, level = nodes + candidates, min(self.beam, candidates)
        return min(self.total_tokens, nodes)


@dataclass(frozen=True)
class StaticTree:
    """A draft tree of fixed ranks. choices: the path of ranks to each node but the root, by depth and then by rank."""

    name: str
    choices: tuple[Choice, ...]

    @classmethod
    def of(cls, name: str, choices: Sequence[Sequence[int]]) -> "StaticTree":
        """Check and order `choices`. Raises UserError unless every node's parent is there, once."""
        paths = [tuple(path) for path in choices]
        if not paths or () in paths:
            raise UserError(f"The tree {name} needs at least one node, and every node a path of at least one rank.")
        known = set(paths)
        if len(known) < len(paths):
            twice = next(path for path in paths if paths.count(path) > 1)
            raise UserError(f"The tree {name} names the node {list(twice)} twice: remove one.")
        if bad := next((path for path in paths if min(path) < 0), None):
            raise UserError(f"The tree {name} has a negative rank in {list(bad)}: ranks count from 0, the most likely.")
        if lost := next((path for path in paths if path[:-1] and path[:-1] not in known), None):
            raise UserError(f"The tree {name} has the node {list(lost)} but not its parent {list(lost[:-1])}: add it.")
        return cls(name, tuple(sorted(paths, key=lambda path: (len(path), path))))

    @cached_property
    def depth(self) -> int:
        """The longest path: num_speculative_tokens of the tree."""
        return len(self.choices[-1])

    @property
    def max_nodes(self) -> int:
        """Nodes of a draft, the root included."""
        return 1 + len(self.choices)

    @cached_property
    def ranks(self) -> int:
        """The number of most likely tokens per head that the tree needs."""
        return 1 + max(path[-1] for path in self.choices)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Nodes at depth 1, 2, ..."""
        return tuple(sum(len(path) == d for path in self.choices) for d in range(1, self.depth + 1))

    @cached_property
    def most_children(self) -> tuple[int, ...]:
        """The most children of a node at depth 0, 1, ...; 0 at the last one."""
        children = Counter(path[:-1] for path in self.choices)
        return tuple(
            max((n for path, n in children.items() if len(path) == d), default=0) for d in range(self.depth + 1)
        )

    def cut(self, depth: int) -> "StaticTree":
        """Return the tree without the nodes deeper than `depth`."""
        return self if depth >= self.depth else _cut(self, depth)

    def on(self, device: torch.device) -> TreeTensors:
        """Return the tree's tensors on `device`."""
        return _tensors(self, device)


@lru_cache(maxsize=256)
def _cut(tree: StaticTree, depth: int) -> StaticTree:
    assert depth >= 1
    return StaticTree(tree.name, tuple(path for path in tree.choices if len(path) <= depth))


@lru_cache(maxsize=256)
def _tensors(tree: StaticTree, device: torch.device) -> TreeTensors:
    paths: list[Choice] = [(), *tree.choices]
    number = {path: node for node, path in enumerate(paths)}
    parents = [-1] + [number[path[:-1]] for path in tree.choices]
    ancestors = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for node, path in enumerate(paths):
        for length in range(len(path) + 1):
            ancestors[node, number[path[:length]]] = True
    return TreeTensors(
        torch.tensor(parents, device=device),
        torch.tensor([len(path) for path in paths], device=device),
        torch.tensor([path[-1] if path else 0 for path in paths], device=device),
        ancestors.to(device),
    )


def load_tree(name: str) -> StaticTree | None:
    """Return the tree that a recipe names: None for `chain`, a published one, or that of a JSON file.

    The file holds a list of paths, [[0], [1], [0, 0], ...], or an object with that list under `choices`. Raises
    UserError for an unknown name and for a file that holds no tree.
    """
    if name == "chain":
        return None
    if name in PUBLISHED:
        return PUBLISHED[name]
    path = Path(name)
    if not os.path.lexists(name.replace("\0", "")):
        raise UserError(
            f"There is no tree {name!r}: take chain, {', '.join(PUBLISHED)}, or a JSON file with a list of paths such as "
            "[[0], [1], [0, 0]]."
        )
    content = read_json(name, "a tree is a list of paths, [[0], [1], [0, 0]]", most=16 * MIB)
    choices: Any = content.get("choices") if isinstance(content, dict) else content
    whole = isinstance(choices, list) and all(
        isinstance(path, list) and all(type(rank) is int and rank < 2**31 for rank in path) for path in choices
    )
    if whole and (len(choices) > MOST_NODES or max(map(len, choices), default=0) > MOST_LEVELS):
        raise UserError(
            f"The tree {name} has {len(choices)} nodes and {max(map(len, choices))} levels: no target checks more than "
            f"{MOST_NODES} nodes in a pass, nor is a draft of more than {MOST_LEVELS} tokens accepted; make it smaller."
        )
    if not whole:
        raise UserError(f"The tree {name} does not hold a list of paths of whole numbers such as [[0], [1], [0, 0]].")
    return StaticTree.of(path.stem, choices)


def save_found(path: Path, found: StaticTree | Sequence[float], origin: dict[str, Any]) -> None:
    """Write a tree as the JSON object that `load_tree` reads, or the floors of a chain; `origin` says what it was made from."""
    what, value = ("choices", [*map(list, found.choices)]) if isinstance(found, StaticTree) else ("floors", [*found])
    write_text(path, f'{{\n  "{what}": {json.dumps(value)},\n  "origin": {_lines(origin, "  ")}\n}}\n')


def _lines(value: Any, margin: str) -> str:
    """Return `value` as JSON with short parts on one line, for readers."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(margin + line) <= 160 or not isinstance(value, dict | list):
        return line
    inside = margin + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_lines(part, inside)}" for key, part in value.items()]
    else:
        parts = [_lines(part, inside) for part in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inside}" + f",\n{inside}".join(parts) + f"\n{margin}{closing}"


def read_origin(path: Path) -> dict[str, Any] | None:
    """Return the origin in a file of `draftsmith search-tree`; None for any other file."""
    try:
        content = read_json(path, "give a tree")
    except UserError:
        return None
    found = isinstance(content, dict) and ("choices" in content or "floors" in content)
    origin = content["origin"] if found and "origin" in content else None
    return origin if isinstance(origin, dict) else None


def _medusa_63() -> StaticTree:
    """The tree that Medusa publishes for 7B models with 63 nodes besides the root (`mc_sim_7b_63`)."""
    counts = {(): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, (0, 0): 10, (0, 1): 3, (0, 2): 2, (1, 0): 2, (0, 0, 0): 2}
    single = [(4,), (5,), (6,), (7,), (8,), (9,), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (2, 0)]
    children: dict[Choice, int] = counts | dict.fromkeys(single, 1)
    return StaticTree.of("medusa_63", [[*path, rank] for path, count in children.items() for rank in range(count)])


PUBLISHED: dict[str, StaticTree] = {"medusa_63": _medusa_63()}
