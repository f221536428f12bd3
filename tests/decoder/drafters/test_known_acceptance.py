"""The drafter of known acceptance, driven without a model: accepted is what agrees with the known answer."""

from collections.abc import Iterator

import pytest
import torch

from draftsmith.decoder.draft import DecodeState, NewTokens, Prompts
from draftsmith.decoder.drafters.known_acceptance import KnownAcceptance
from draftsmith.decoder.sampling import Sampling
from draftsmith.errors import UserError

VOCAB = 50
LENGTH = 400


def make_answers(count: int) -> dict[tuple[int, ...], list[int]]:
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(0, VOCAB, (3 + i,), generator=generator).tolist()) for i in range(count)]
    return {prompt: torch.randint(0, VOCAB, (LENGTH,), generator=generator).tolist() for prompt in prompts}


def enter(drafter: KnownAcceptance, rows: list[int], prompts: list[tuple[int, ...]]) -> None:
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    nothing = torch.zeros(len(prompts), longest, 0)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    drafter.admit(Prompts(torch.tensor(rows), ids, lengths, NewTokens(ids, nothing, nothing, lengths)))


def propose(drafter: KnownAcceptance, places: list[int], keys: list[int], limits: list[int]) -> list[list[int]]:
    """Drafts behind roots at positions `places`."""
    zeros = torch.zeros(len(places), dtype=torch.long)
    new_tokens = NewTokens(zeros[:, None], torch.zeros(len(places), 1, 0), torch.zeros(len(places), 1, 0), zeros)
    state = DecodeState(zeros, torch.tensor(places), torch.tensor(limits), torch.tensor(keys), new_tokens, Sampling())
    draft = drafter.propose(state)
    pairs = zip(draft.tokens_BN.tolist(), draft.nodes_B.tolist(), strict=True)
    return [tokens[1:count] for tokens, count in pairs]


def rounds(drafter: KnownAcceptance, prompt: tuple[int, ...], answer: list[int], key: int) -> Iterator[int]:
    """Accepted drafts of each round, as the target would accept them at temperature 0."""
    enter(drafter, [0], [prompt])
    text = [*prompt, *answer]
    place = len(prompt)
    while place < len(text) - 1:
        (drafted,) = propose(drafter, [place], [key], [len(text) - 2 - place])
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == text[place + 1 + accepted]:
            accepted += 1
        yield accepted
        place += accepted + 1


@pytest.mark.parametrize(("alpha", "length"), [(0.8, 5), (0.5, 3), (0.0, 4), (1.0, 4)])
def test_tau_is_what_the_rate_says(alpha: float, length: int) -> None:
    answers = make_answers(12)
    drafter = KnownAcceptance(answers, alpha, length, VOCAB)
    drafter.start(1, 20 + LENGTH)
    accepted = [
        n
        for key, (prompt, answer) in enumerate(answers.items())
        for n in list(rounds(drafter, prompt, answer, key))[:-1]
    ]
    expected = (1 - alpha ** (length + 1)) / (1 - alpha) if alpha < 1 else length + 1
    spread = torch.tensor(accepted, dtype=torch.float).std().item() / len(accepted) ** 0.5
    assert sum(accepted) / len(accepted) + 1 == pytest.approx(expected, abs=4 * spread + 1e-9)


def test_drafts_end_with_the_answer_and_the_limit() -> None:
    answers = make_answers(1)
    ((prompt, answer),) = answers.items()
    drafter = KnownAcceptance(answers, 1.0, 4, VOCAB)
    drafter.start(1, 20 + LENGTH)
    enter(drafter, [0], [prompt])
    end = len(prompt) + len(answer) - 1
    assert propose(drafter, [end - 2], [0], [9]) == [answer[-2:]]
    assert propose(drafter, [end], [0], [9]) == [[]]
    assert propose(drafter, [end - 9], [0], [3]) == [answer[-9:-6]]
    assert propose(drafter, [end - 9], [0], [-1]) == [[]]


def test_an_unknown_prompt_is_refused() -> None:
    drafter = KnownAcceptance(make_answers(1), 0.5, 4, VOCAB)
    drafter.start(1, 20)
    with pytest.raises(UserError, match="no known answer"):
        enter(drafter, [0], [(1, 2)])
