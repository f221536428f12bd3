"""Costs of running servers: what is timed, held to what made-up answers take, and which servers make a table."""

from collections.abc import Sequence

import pytest

from draftsmith.errors import UserError
from draftsmith.eval.clocks.cost_table import ALONE, CostTable
from draftsmith.eval.engines import server as server_costs
from draftsmith.eval.engines.server import TOKENS, Batch, Event, measure_served, time_batch
from tests.eval.planner.plans import TARGET


class Clocked:
    """A server with a clock of its own. A prompt takes 1 ms a token, a round 10 ms, 2 for every row at work and 3 for every drafted
    token; a row accepts `accepts` of these, the rows with odd numbers one fewer. slots: rows at once."""

    engine = "vLLM 9"
    model = "served"

    def __init__(
        self, k: int, accepts: int = 0, slots: int = 64, drafted: float | None = None, large: int | None = None
    ) -> None:
        self.url, self.k, self.accepts, self.slots = f"http://k{k}", k, accepts, slots
        self.drafted, self.large = k if drafted is None else drafted, large
        self.asked: list[tuple[int, int, int]] = []

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Batch:
        rows, now = len(prompts), 100.0
        self.asked.append((rows, len(prompts[0]), tokens))
        assert all(0 <= token < 50 for prompt in prompts for token in prompt)
        answers: list[list[Event]] = [[] for _ in prompts]
        waiting, working = list(range(rows)), []
        while waiting or working:
            while waiting and len(working) < self.slots:
                row = waiting.pop(0)
                now += (len(prompts[row]) + 5 * self.k) / 1000
                answers[row].append(Event(now, 1, 0))
                working.append(row)
            now += (10 + 2 * len(working) + 3 * self.k) / 1000
            for row in list(working):
                last = answers[row][-1]
                known = min(tokens, last.tokens + 1 + max(0, self.accepts - row % 2))
                answers[row].append(Event(now, known, last.rounds + 1))
                if known == tokens:
                    working.remove(row)
        drafted = self.large if rows > 1 and self.large is not None else self.drafted
        return Batch(100.0, tuple(tuple(rows) for rows in answers), drafted)


def measure(*servers: Clocked, batches: Sequence[int] = (1, 4), contexts: Sequence[int] = (20, 7)) -> CostTable:
    return measure_served(
        servers,
        TARGET,
        "eagle3",
        range(50),
        0.0,
        batches=batches,
        contexts=contexts,
        command="c",  # type: ignore[arg-type]
    )


def test_a_round_is_timed_while_all_rows_are_at_work() -> None:
    """Also where rows are done at different times: with fewer of them rounds are shorter."""
    for server, round_ms in ((Clocked(0), 18.0), (Clocked(3, accepts=2), 27.0)):
        timing = time_batch(server.answer([[1] * 10] * 4, 60, 0.0))
        assert timing.round_ms == pytest.approx(round_ms)
        assert timing.rounds == (58 if server.k == 0 else 19), "of a row that had its first token before the last one"
    assert time_batch(Clocked(0).answer([[1] * 10] * 4, 60, 0.0)).first_ms == pytest.approx(40)
    assert time_batch(Clocked(0, slots=2).answer([[1] * 10] * 4, 60, 0.0)).rounds <= 0


def test_a_table_holds_whole_rounds_and_nothing_that_was_not_measured() -> None:
    servers = Clocked(5, accepts=3), Clocked(0), Clocked(2, accepts=1)
    table = measure(*servers)
    assert [(p.batch, p.context) for p in table.points] == [(1, 7), (1, 20), (4, 7), (4, 20)]
    for point in table.points:
        alone = 10 + 2 * point.batch
        assert point.round_ms == {
            ALONE: {"0": pytest.approx(alone)},
            "eagle3": {"2": pytest.approx(alone + 6), "5": pytest.approx(alone + 15)},
        }
        assert point.verify_ms == point.draft_ms == point.overhead_ms == {}
        assert point.admit_ms == {"eagle3": pytest.approx(point.batch * 25)}, "its first tokens are so much later"
    assert (table.hardware, table.dtype, table.bandwidth, table.weights_bytes) == (None, None, None, None)
    assert [(s.url, s.num_speculative_tokens) for s in table.servers] == [
        ("http://k0", 0),
        ("http://k2", 2),
        ("http://k5", 5),
    ]
    assert table.place == "running servers (vLLM 9 at http://k0, vLLM 9 at http://k2, vLLM 9 at http://k5)"
    assert servers[1].asked[1] == (4, 20, TOKENS), "the largest first, where there may be no room"


def test_a_round_that_was_held_up_is_timed_again() -> None:
    """The server is slow while it is first asked behind 7 tokens, and no longer afterwards."""
    server, answer = Clocked(2, accepts=1), Clocked.answer
    slow = [server_costs.REPEATS + 1]

    def held_up(prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> Batch:
        batch = answer(server, prompts, tokens, temperature)
        if len(prompts[0]) != 7 or not slow[0] or len(server.asked) < 3:
            return batch
        slow[0] -= 1
        first = batch.answers[0][0].at
        late = tuple(
            tuple(Event(first + 3 * (e.at - first), e.tokens, e.rounds) for e in rows) for rows in batch.answers
        )
        return Batch(batch.started, late, batch.draft_length)

    server.answer = held_up  # type: ignore[method-assign]
    table = measure(Clocked(0), server, batches=[1])
    assert not slow[0]
    assert [point.round_ms["eagle3"]["2"] for point in table.points] == [pytest.approx(18), pytest.approx(18)]


def test_answers_grow_until_they_have_enough_rounds() -> None:
    """With K + 1 tokens a round they end sooner."""
    server = Clocked(7, accepts=7)
    measure(Clocked(0), server, batches=[1], contexts=[8])
    assert [tokens for *_, tokens in server.asked] == [TOKENS, TOKENS, 2 * TOKENS, *[2 * TOKENS] * server_costs.REPEATS]


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ([Clocked(1), Clocked(3)], "http://k1, http://k3 none serves the target alone"),
        ([Clocked(0)], "http://k0 none drafts"),
        ([Clocked(0), Clocked(3), Clocked(3)], "http://k3 and http://k3 both draft 3 tokens a round"),
        ([Clocked(0), Clocked(0)], "both serve the target alone"),
        ([Clocked(0), Clocked(3, drafted=2.4)], r"http://k3 drafted 2\.40 tokens a round on average"),
        ([Clocked(0), Clocked(3, large=1)], "http://k3 drafts 3 tokens a round at batch 1, but 1 at batch 4"),
        ([Clocked(0, slots=2), Clocked(3)], "http://k0 answered 4 prompts of 20 tokens together for 0 rounds only"),
    ],
)
def test_servers_that_make_no_table_are_one_sentence(servers: list[Clocked], message: str) -> None:
    with pytest.raises(UserError, match=message):
        measure(*servers)
