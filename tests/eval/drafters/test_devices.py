"""Nothing is left on the CPU by drafters without a head: a pretended second device, value for value."""

from collections.abc import Callable

import pytest
import torch

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import Drafter, TargetAlone
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.decoder.drafters.known_acceptance import KnownAcceptance
from draftsmith.decoder.drafters.lookahead import Lookahead
from draftsmith.decoder.drafters.suffix_decoding import Outputs, SuffixDecoding, SuffixRules
from draftsmith.decoder.drafters.texts import PromptLookup
from draftsmith.decoder.sampling import Sampling, row_key
from draftsmith.eval.simulate.texts import draft_model_simulator
from draftsmith.target.target import Target
from tests.far_device import far_device, move_module
from tests.models import tiny_model

pytestmark = pytest.mark.full

V = 160
SAMPLINGS = [Sampling(), Sampling(0.8, top_k=30, top_p=0.9)]


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def make_model(far: bool, **overrides: int) -> Target:
    model = tiny_model("llama", num_hidden_layers=2, **overrides)
    return Target(move_module(model) if far else model, path="tiny", fingerprint="0")


def make_requests() -> list[Request]:
    prompts = [[5, 7, 9, 5, 7], [5, 7, 9, 11, 30, 80], [4, 4, 4]]
    return [Request(f"p{i}", "a", tuple(ids), 5 + 3 * i, row_key(0, i)) for i, ids in enumerate(prompts)]


def known() -> dict[tuple[int, ...], list[int]]:
    found = decode_batch(make_model(False), TargetAlone(), make_requests(), Sampling()).generations
    return {g.request.prompt_ids: g.output_ids for g in found}


DRAFTERS: dict[str, Callable[[bool], Drafter]] = {
    "prompt lookup": lambda far: PromptLookup(3),
    "suffix tree": lambda far: SuffixDecoding(4, SuffixRules(alpha=2, tree=True), Outputs([[5, 7, 9]])),
    "lookahead": lambda far: Lookahead(3, 3, 2),
    "draft model": lambda far: DraftModel(make_model(far, seed=0, vocab_size=V), 3, V),
    "smaller vocabulary": lambda far: DraftModel(make_model(far, seed=1, vocab_size=V - 16), 3, V),
}


def answer(drafter: Drafter, far: bool, sampling: Sampling) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Three prompts in two rows, so that one is admitted while the other drafts."""
    decoded = decode_batch(make_model(far), drafter, make_requests(), sampling, rows=2)
    return [(g.output_ids, [(r.drafted, r.accepted) for r in g.rounds]) for g in decoded.generations]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.slow
def test_decoding(name: str, sampling: Sampling) -> None:
    here = answer(DRAFTERS[name](False), False, sampling)
    with far_device():
        assert answer(DRAFTERS[name](True), True, sampling) == here


def test_known_acceptance() -> None:
    answers = known()
    here = answer(KnownAcceptance(answers, 0.6, 3, V), False, Sampling())
    with far_device():
        assert answer(KnownAcceptance(answers, 0.6, 3, V), True, Sampling()) == here
    assert any(accepted for _, rounds in here for _, accepted in rounds)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_simulation_of_a_draft_model(sampling: Sampling) -> None:
    texts = decode_batch(make_model(False), TargetAlone(), make_requests(), sampling).generations

    def simulate(far: bool) -> list[float]:
        draft = make_model(far, seed=1, vocab_size=V - 16)
        found = draft_model_simulator(draft)(make_model(far), texts, sampling, 3)
        return [tally.rounds for by_k in found.tallies for tally in by_k]

    here = simulate(False)
    with far_device():
        assert simulate(True) == pytest.approx(here, rel=1e-5)
