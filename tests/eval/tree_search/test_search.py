"""The search for static trees against the enumeration of every tree, the recursion, and texts of known distributions."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.answers import total
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import Choice, StaticTree, load_tree, read_origin, save_found
from draftsmith.errors import UserError
from draftsmith.eval.results.result import Costs
from draftsmith.eval.simulate.acceptance import acceptance, find_answers, simulate, token_ranks
from draftsmith.eval.tree_search import search as tree_search
from draftsmith.eval.tree_search.search import (
    FoundTree,
    TextRanks,
    TreeCosts,
    arrivals,
    count_rounds,
    count_visits,
    fastest,
    find_trees,
    grow,
    measure_tree,
    sizes_up_to,
)
from draftsmith.heads.base import HeadOutput, StepOutput, iterate_supervised_rows
from draftsmith.target.target import TargetHead


def every_tree(ranks: int, depth: int, nodes: int) -> list[tuple[Choice, ...]]:
    """All sets of `nodes` paths that hold the parent of each."""
    paths = [path for d in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=d)]
    sets = itertools.combinations(paths, nodes)
    return [tree for tree in sets if all(len(path) == 1 or path[:-1] in tree for path in tree)]


def share(path: Choice, ranks_RD: np.ndarray, weight_R: np.ndarray) -> float:
    """The worth of a path, one root after the other."""
    worth = 1.0
    for d, rank in enumerate(path):
        before = sum(w for row, w in zip(ranks_RD, weight_R, strict=True) if tuple(row[:d]) == path[:d])
        with_it = sum(w for row, w in zip(ranks_RD, weight_R, strict=True) if tuple(row[: d + 1]) == path[: d + 1])
        going = sum(w for row, w in zip(ranks_RD, weight_R, strict=True) if d == 0 or row[d - 1] >= 0)
        overall = sum(w for row, w in zip(ranks_RD, weight_R, strict=True) if row[d] == rank) / going
        prior = tree_search.PRIOR
        worth *= (with_it + prior * overall) / (before + prior) if before + prior else 0.0
    return worth


def some_roots(seed: int, depth: int = 3, ranks: int = 3, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Ranks that depend on those before them, some of them cut off by an end, and how often rounds begin there."""
    rng = np.random.default_rng(seed)
    ranks_RD = rng.geometric(0.5, (count, depth)) - 1
    ranks_RD[:, 1:] += ranks_RD[:, :-1] * rng.integers(0, 2, (count, depth - 1))
    ranks_RD = np.minimum(ranks_RD, ranks)
    for row, length in zip(ranks_RD, rng.integers(1, depth + 2, count), strict=True):
        row[length:] = -1
    return ranks_RD, rng.integers(0, 3, count).astype(float)


@pytest.mark.parametrize("prior", [0.0, 5.0, 1e9])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_tree_of_any_size_is_worth_more_than_the_grown_one(
    seed: int, prior: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_search, "PRIOR", prior)
    ranks_RD, weight_R = some_roots(seed)
    for depth, most in ((2, 3), (3, 2)):
        cut_RD = np.minimum(ranks_RD[:, :depth], most)
        order = grow(cut_RD, weight_R, 5, most)
        paths = {path for tree in every_tree(most, depth, 5) for path in tree}
        worth = {path: share(path, cut_RD, weight_R) for path in paths}
        for nodes in range(1, 6):
            assert StaticTree.of("grown", order[:nodes])
            best = max(sum(worth[path] for path in tree) for tree in every_tree(most, depth, nodes))
            assert sum(worth[path] for path in order[:nodes]) == pytest.approx(best, abs=1e-12)


def test_where_texts_have_ended_no_rank_is_counted() -> None:
    """Of the two roots that go on after the first step, half have rank 1 at the second."""
    ranks_RD = np.array([[-1, -1], [0, 1], [2, -1], [-1, -1]])
    shares_DM = tree_search._rank_shares(ranks_RD, np.array([1.0, 1.0, 1.0, 5.0]), 2)
    np.testing.assert_allclose(shares_DM, [[1 / 8, 0], [0, 1 / 2]])


def test_all_paths_come_back_where_there_are_no_more() -> None:
    ranks_RD, weight_R = some_roots(3)
    assert sorted(grow(ranks_RD, weight_R, 99, 2)) == sorted(
        path for d in (1, 2, 3) for path in itertools.product(range(2), repeat=d)
    )


V = 30


class Toy:
    """Answers whose token at depth d stands at a rank that is drawn from a distribution, given the rank before it; as the output of
    a head over a batch, two answers to a document, several documents to a row."""

    def __init__(self, seed: int, *, depth: int = 4, rows: int = 6) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(2, 30, (rows, 4)).tolist()
        mask, document = [], []
        for row in lengths:
            runs = [(k % 2 == 1, k // 4) for k in range(8)]
            sizes = [n for length in row for n in (3, length)]
            mask.append([bit for (bit, _), n in zip(runs, sizes, strict=True) for _ in range(n)])
            document.append([number for (_, number), n in zip(runs, sizes, strict=True) for _ in range(n)])
        longest = max(map(len, mask))
        ids = torch.from_numpy(rng.integers(0, V, (rows, longest)))
        mask_BL = torch.tensor([row + [False] * (longest - len(row)) for row in mask])
        document_BL = torch.tensor([row + [-1] * (longest - len(row)) for row in document])
        self.batch = TrainBatch(
            ids, mask_BL, document_BL, torch.zeros_like(ids), torch.zeros(rows, longest, 0),
            torch.zeros(rows, longest, V), ids.roll(-1, 1), torch.zeros(rows, longest),
        )  # fmt: skip
        self.vocab = torch.from_numpy(np.sort(rng.permutation(V)[: V - 4]))
        self.output = HeadOutput(tuple(self._steps(rng, depth)))
        self.answers = find_answers(self.batch)
        self.depth = depth

    def _steps(self, rng: np.random.Generator, depth: int) -> "list[StepOutput]":
        steps, ids = [], self.batch.ids.flatten()
        harder = np.zeros(len(ids))
        for offset, mask_BL in zip(range(depth), iterate_supervised_rows(self.batch), strict=False):
            rows = mask_BL.flatten().nonzero()[:, 0]
            logits = torch.from_numpy(
                rng.permuted(np.tile(np.arange(len(self.vocab), dtype=float), (len(rows), 1)), axis=1)
            )
            for place, row in enumerate(rows.tolist()):
                column = (self.vocab == ids[row + 2 + offset]).nonzero()
                if len(column):
                    rank = min(int(rng.geometric(0.55 - 0.1 * min(harder[row], 4))) - 1, len(self.vocab) - 1)
                    harder[row] = rank
                    logits[place, logits[place] == len(self.vocab) - 1 - rank] = logits[place, column[0]]
                    logits[place, column[0]] = len(self.vocab) - 1 - rank
            steps.append(StepOutput(offset, rows, logits.float()))
        return steps

    def texts(self, most: int) -> TextRanks:
        ranks = token_ranks(self.output, self.batch, self.vocab, most).numpy()
        found = [ranks[a.row, a.first - 1 : a.last - 1] for a in self.answers]
        return TextRanks.of(found, [f"talk-{a.row}-{a.document}" for a in self.answers], most)

    def simulated(self, tree: StaticTree) -> float:
        """The tau of a tree by the recursion."""
        head = TargetHead(torch.eye(V))
        c_BLK = acceptance(self.output, self.batch, head, self.vocab, Sampling(), tree=tree).c_BLK
        tau = total(simulate(c_BLK, self.answers, min(tree.depth, self.depth)), min(tree.depth, self.depth)).tau
        assert tau is not None
        return tau


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(0)


def test_every_size_has_the_simulated_accepted_length(toy: Toy) -> None:
    sizes = [1, 2, 3, 5, 9, 20, 40]
    texts = toy.texts(12)
    found = find_trees(texts, sizes)
    assert [len(one.tree.choices) for one in found] == sizes
    for one in found:
        assert one.tau == pytest.approx(toy.simulated(one.tree), abs=1e-12)
        assert one.tau == measure_tree(one.tree, texts)
    assert [one.tau for one in found] == sorted(one.tau for one in found)
    chain = StaticTree.of("chain", [[0] * d for d in range(1, 5)])
    assert measure_tree(chain, texts) == pytest.approx(toy.simulated(chain), abs=1e-12)


def test_visits_are_the_rounds_and_ends_are_no_places() -> None:
    texts = Toy(2).texts(5)
    order = [(0,), (0, 0), (1,)]
    reached = arrivals(order, texts)
    visits = count_visits(reached, texts.tokens_S, 3)
    assert np.array_equal(visits.sum(1), count_rounds(reached, texts.tokens_S, [3])[0])
    assert not visits[~texts.roots_ST].any()
    # One answer by hand: accepted 2, then none, then one of a last token.
    ranks = np.array([[0, 0], [0, 2], [9, 0], [1, 0], [0, 0], [0, -1]], dtype=np.int16)
    one = TextRanks.of([ranks], ["a"], 9)
    assert np.flatnonzero(count_visits(arrivals(order, one), one.tokens_S, 3)[0]).tolist() == [0, 3, 5]
    assert count_rounds(arrivals(order, one), one.tokens_S, [1, 2, 3]).tolist() == [[4], [3], [3]]


def test_roots_count_as_often_as_rounds_begin_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in which rank 0 is right at half of all places, but rank 1 where rounds begin."""
    rhythm = np.array([1, 2, 1, 0, 0, 1, 0, 0] * 4, dtype=np.int16)[:, None]
    texts = TextRanks.of([rhythm] * 8, list("abcdefgh"), 3)
    taus = [measure_tree(StaticTree.of("one", [[rank]]), texts) for rank in range(3)]
    assert max(taus) == taus[1] == pytest.approx(1.6)
    (found,) = find_trees(texts, [1])
    assert found.tree.choices == ((1,),)
    monkeypatch.setattr(tree_search, "PASSES", 1)
    (uniform,) = find_trees(texts, [1])
    assert uniform.tree.choices == ((0,),), "as if rounds began everywhere"


def dependent(seed: int, count: int) -> TextRanks:
    """Answers some of whose places are hard for every step of the head and some easy, as it is with real heads."""
    rng = np.random.default_rng(seed)
    answers = []
    for length in rng.integers(15, 40, count):
        easy = rng.random((length, 1)) < 0.5
        ranks = np.where(easy, rng.geometric(0.8, (length, 3)), rng.geometric(0.12, (length, 3))) - 1
        answers.append(np.minimum(ranks, 30).astype(np.int16))
    return TextRanks.of(answers, [str(i) for i in range(count)], 30)


@pytest.mark.parametrize(("answers", "gain"), [(8, 0.005), (150, -0.005)])
def test_the_prior_helps_on_few_answers_and_does_no_harm_on_many(
    answers: int, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On answers that the search has not seen: against the sample alone, and against shares by depth alone."""
    new_tokens, taus = dependent(99, 1500), []
    for prior in (tree_search.PRIOR, 0.0, 1e9):
        monkeypatch.setattr(tree_search, "PRIOR", prior)
        orders = [tree_search._search(dependent(seed, answers), [30])[0][0] for seed in range(8)]
        taus.append(np.mean([measure_tree(StaticTree.of("found", order), new_tokens) for order in orders]))
    assert taus[0] > taus[1] + gain
    assert taus[0] > taus[2] + 0.02


def test_held_back_answers_do_not_flatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without any distribution: a tree fits the answers that it was found on, and no others."""

    def noise(seed: int, count: int) -> TextRanks:
        rng = np.random.default_rng(seed)
        answers = [rng.integers(0, 40, (20, 2)).astype(np.int16) for _ in range(count)]
        return TextRanks.of(answers, [str(i) for i in range(count)], 40)

    monkeypatch.setattr(tree_search, "PRIOR", 0.0)
    (found,) = find_trees(noise(0, 24), [20])
    new_tokens = measure_tree(found.tree, noise(1, 400))
    assert found.tau > new_tokens + 0.1
    assert found.tau_held_back == pytest.approx(new_tokens, abs=0.05)


def test_turns_of_a_conversation_are_held_back_together() -> None:
    texts = dependent(0, 12)
    twins = TextRanks(texts.ranks_STD, texts.tokens_S, tuple("abcdefabcdef"), 30)
    folds = tree_search.folds(twins.conversations, twins.tokens_S)
    assert folds[:6].tolist() == folds[6:].tolist()
    assert set(folds.tolist()) == set(range(tree_search.FOLDS))


def test_too_few_answers_are_counted() -> None:
    texts = dependent(0, 5)
    empty = TextRanks.of([np.zeros((0, 3), np.int16)] * 3 + [np.zeros((4, 3), np.int16)] * 3, list("abcdef"), 30)
    assert find_trees(texts, [2])
    for few, number in ((texts.some(np.arange(5) < 3), 3), (empty, 3)):
        with pytest.raises(UserError, match=f"only {number} conversations"):
            find_trees(few, [2])


def test_sizes_make_round_target_passes() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(18) == [*range(1, 18), 18]
    sizes = sizes_up_to(127)
    assert sizes[:16] == list(range(1, 17))
    assert sizes[16:] == [*range(17, 32, 2), *range(35, 64, 4), *range(71, 128, 8)]


def test_costs_lie_between_the_measured_ones() -> None:
    small, large = (StaticTree.of(f"{n} nodes", [[r] for r in range(n - 1)] + [[0, 0]]) for n in (4, 8))
    measured = Costs(
        {"1": 10.0, "4": 12.0, "8": 20.0, "9": 24.0},
        {"head 4 nodes": {"1": 1.0, "2": 3.0}, "head 8 nodes": {"1": 2.0, "2": 5.0}},
    )
    costs = TreeCosts(measured, (small, large))
    for tree, parts in (
        (small, (14.0, 3.0)),
        (large, (24.0, 5.0)),
        (StaticTree.of("wide", [[r] for r in range(6)]), (18.0, 1.5)),
    ):
        made = costs.budget(FoundTree(tree, 2.0, 2.0))
        assert (made.verify_ms, made.draft_ms) == parts
    budget = costs.budget(FoundTree(large, 3.0, 2.9))
    assert budget.speedup == pytest.approx(2.9 * 10 / (24 + 5))
    slower, faster = (costs.budget(FoundTree(small, tau, tau)) for tau in (1.6, 1.8))
    assert fastest([slower, budget]) is fastest([budget, slower]) is budget
    assert fastest([faster, budget]) is fastest([budget, faster]) is faster


def test_a_saved_tree_loads_and_says_where_it_comes_from(tmp_path: Path) -> None:
    (found,) = find_trees(dependent(0, 10), [20])
    origin = {
        "head": {"method": "medusa", "word": "τ"},
        "sizes": [{"nodes": n, "tau": 1.5} for n in range(30)],
        "none": {},
    }
    save_found(tmp_path / "found.json", found.tree, origin)
    assert load_tree(str(tmp_path / "found.json")) == StaticTree("found", found.tree.choices)
    assert read_origin(tmp_path / "found.json") == origin
    lines = (tmp_path / "found.json").read_text().splitlines()
    assert '      {"nodes": 7, "tau": 1.5},' in lines, "a size per line, not a number per line"
    for name, text in (("list.json", "[[0]]"), ("bare.json", '{"choices": [[0]]}'), ("bad.json", "{")):
        (tmp_path / name).write_text(text)
        assert read_origin(tmp_path / name) is None
    assert read_origin(tmp_path / "nowhere.json") is None
