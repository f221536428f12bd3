"""A separate draft model against plain forwards of its whole text, and against the simulator."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from draftsmith.decoder.answers import Request, tally_generation, total
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import DecodeState, Draft
from draftsmith.decoder.drafters.draft_model import DraftModel
from draftsmith.decoder.sampling import DRAFT, Sampling, draw, probs, uniforms
from draftsmith.errors import UserError
from draftsmith.eval.simulate.texts import draft_model_simulator
from draftsmith.target.target import Target
from draftsmith.target.tokens import check_same_tokens
from tests.decoder.spies import KnowsTexts, decode_together_and_alone
from tests.helpers import tiny_tokenizer
from tests.models import tiny_model

pytestmark = pytest.mark.full

V = 160
LAYERS = 2


@cache
def make_target() -> Target:
    return Target(tiny_model("llama", num_hidden_layers=LAYERS), path="tiny", fingerprint="0")


@cache
def make_draft(vocab_size: int = V) -> Target:
    """The target with noise on its weights, so that some of its drafts are accepted; padded or cut to `vocab_size`."""
    model = tiny_model("llama", num_hidden_layers=LAYERS, vocab_size=vocab_size)
    weights = make_target().model.state_dict()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            noisy = weights[name] + 0.009 * torch.randn(weights[name].shape, generator=generator)
            rows = min(len(parameter), len(noisy))
            parameter[:rows] = noisy[:rows]
    return Target(model, path="draft", fingerprint="1")


def requests(limits: tuple[int, ...] = (24,) * 6) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 17, 9, 30, 3, 12)
    found = [torch.randint(5, 150, (n,), generator=generator).tolist() for n in lengths]
    pairs = zip(found, limits, strict=True)
    return [Request.seeded(f"p{i}", "a", prompt, limit, 0) for i, (prompt, limit) in enumerate(pairs)]


class Spy(KnowsTexts, DraftModel):
    """Checks every draft against plain forwards of the draft model over a text that it keeps itself."""

    checked = 0

    def propose(self, state: DecodeState) -> Draft:
        draft = super().propose(state)
        for row, known in self.remember(state):
            self._check(state, draft, row, known)
        return draft

    def _check(self, state: DecodeState, draft: Draft, row: int, known: list[int]) -> None:
        drafted = draft.tokens_BN[row, 1 : int(draft.nodes_B[row])].tolist()
        assert len(drafted) == min(self.num_speculative_tokens, int(state.limit_B[row]))
        assert (draft.draft_probs_BMW is None) == (self.greedy_drafts or state.sampling.greedy)
        uniform = uniforms(state.keys_B[row, None], state.length_B[row, None], DRAFT, len(drafted))[0]
        for k, token in enumerate(drafted):
            whole = torch.tensor([[*known, *drafted[:k]]]).clamp(max=self.model.vocab_size - 1)
            logits_W = self.model.head.logits(self.model.forward(whole).last[0, -1])[: self.width]
            self.checked += 1
            if draft.draft_probs_BMW is None:
                assert logits_W[token] >= logits_W.max() - 1e-4
                continue
            q_W = probs(logits_W, state.sampling)
            torch.testing.assert_close(draft.draft_probs_BMW[row, k], q_W, atol=1e-4, rtol=1e-3)
            assert token == int(draw(draft.draft_probs_BMW[row, None, k], uniform[None, k])[0])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.8, top_k=20, top_p=0.9)], ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "rows", "greedy"), [(V, 1, False), (V - 16, 3, False), (V + 16, 6, False), (V, 2, True)]
)
def test_drafts_are_those_of_plain_forwards(sampling: Sampling, vocab_size: int, rows: int, greedy: bool) -> None:
    """Ragged prompts, rows that end early and are taken over, vocabularies padded differently."""
    target, asked = make_target(), requests((16, 3, 11, 1, 14, 8))
    spy = Spy(make_draft(vocab_size), 3, target.vocab_size, greedy_drafts=greedy)
    make = lambda: DraftModel(make_draft(vocab_size), 3, target.vocab_size, greedy_drafts=greedy)  # noqa: E731
    found = decode_together_and_alone(target, spy, make, asked, sampling, rows)
    assert spy.checked > 25
    accepted = {r.accepted for g in found for r in g.rounds}
    assert {0, 1 if greedy and not sampling.greedy else 3} <= accepted, "rejected at once and accepted to their end"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
@pytest.mark.parametrize("length", [1, 4])
def test_a_model_accepts_all_of_its_own_drafts(sampling: Sampling, length: int) -> None:
    target = make_target()
    drafter = DraftModel(target, length, target.vocab_size)
    for generation in decode_batch(target, drafter, requests(), sampling, rows=3).generations:
        assert all(r.accepted == r.drafted for r in generation.rounds)
        tokens = len(generation.output_ids) - 1
        assert len(generation.rounds) == -(-tokens // (length + 1))


@pytest.mark.parametrize("vocab_size", [V, V - 16])
def test_the_simulation_is_what_was_decoded_at_temperature_0(vocab_size: int) -> None:
    target, draft = make_target(), make_draft(vocab_size)
    found = decode_batch(target, DraftModel(draft, 3, V), requests(), Sampling(), rows=3).generations
    decoded = total([tally_generation(g, 3) for g in found], 3)
    simulation = draft_model_simulator(draft)(target, found, Sampling(), 5)
    simulated = total([t[2] for t in simulation.tallies], 3)
    assert simulation.off_text == 0
    assert (decoded.tokens, decoded.drafted) == (simulated.tokens, simulated.drafted)
    assert decoded.rounds == pytest.approx(simulated.rounds)
    assert decoded.accepted_K.tolist() == pytest.approx(simulated.accepted_K.tolist())
    assert decoded.reached_K.tolist() == pytest.approx(simulated.reached_K.tolist())
    assert decoded.accepted_K[-1] > 0


@pytest.mark.parametrize("greedy_drafts", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(0.8, top_k=20), Sampling(1.0, repetition_penalty=1.3)], ids=str)
def test_the_simulation_predicts_sampled_decoding(sampling: Sampling, greedy_drafts: bool) -> None:
    target, draft = make_target(), make_draft(V - 16)
    asked = [replace(r, key=r.key + n) for n in range(6) for r in requests()]
    drafter = DraftModel(draft, 3, V, greedy_drafts=greedy_drafts)
    found = decode_batch(target, drafter, asked, sampling).generations
    simulation = draft_model_simulator(draft, greedy_drafts=greedy_drafts)(target, found, sampling, 3)
    errors = [tally_generation(g, 3).rounds - t[2].rounds for g, t in zip(found, simulation.tallies, strict=True)]
    if greedy_drafts:
        # Given the text, an argmax draft was accepted or not: nothing is left to chance.
        assert errors == pytest.approx([0] * len(errors), abs=1e-9)
    else:
        assert 0 < abs(sum(errors)) < 3 * sum(e * e for e in errors) ** 0.5


def test_texts_beyond_the_draft_models_context_are_refused() -> None:
    short = Target(tiny_model("llama", max_position_embeddings=40), path="short", fingerprint="2")
    asked = [replace(requests()[0], max_new_tokens=n) for n in (31, 32)]
    drafter = DraftModel(short, 4, V)
    decode_batch(make_target(), drafter, asked[:1], Sampling())
    with pytest.raises(UserError, match="short reads at most 40 tokens, but the longest text with its draft has 41"):
        decode_batch(make_target(), drafter, asked[1:], Sampling())


def test_the_same_tokenizer_is_accepted_and_another_one_is_named() -> None:
    ours = tiny_tokenizer()
    check_same_tokens(ours, tiny_tokenizer(), "draft")
    more = tiny_tokenizer()
    more.add_tokens(["newcomer", "another"])
    last = len(ours)
    with pytest.raises(UserError, match=f"draft has another tokenizer.*id {last} is 'newcomer' there and no token in"):
        check_same_tokens(ours, more, "draft")
    with pytest.raises(UserError, match=f"id {last} is no token there and 'newcomer' in the target"):
        check_same_tokens(more, ours, "draft")
    with pytest.raises(UserError, match="its eos_token_id is"):
        check_same_tokens(ours, tiny_tokenizer(eos="</s>"), "draft")
