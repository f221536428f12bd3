"""The drafters of this repository pass the conformance suite, and every check of it finds a broken one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.decoder import growth
from draftsmith.decoder.draft import LengthRule
from draftsmith.decoder.sampling import draw
from draftsmith.eval.conformance import suite
from draftsmith.eval.conformance.suite import CHECKS, Spec, check_layouts, run_conformance, tiny_target
from draftsmith.heads import drafters, plan
from draftsmith.heads.base import DraftHead
from draftsmith.heads.dflash import DFlashOptions
from draftsmith.heads.dflash2 import DFlash2Options
from draftsmith.heads.domino import DominoOptions
from draftsmith.heads.draft_model import DraftLmOptions
from draftsmith.heads.drafters import HeadDrafter, LayerCache
from draftsmith.heads.dspark import DSparkOptions
from draftsmith.heads.dspark.head import DSparkHead
from draftsmith.heads.eagle.base import EagleDrafter
from draftsmith.heads.eagle1 import Eagle1Options
from draftsmith.heads.eagle1.head import Eagle1Head
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import Eagle3Head
from draftsmith.heads.formats.layout import layouts, layouts_of
from draftsmith.heads.hydra import HydraOptions
from draftsmith.heads.jetspec import JetSpecOptions
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import MedusaDrafter
from draftsmith.heads.medusa2 import Medusa2Options
from draftsmith.heads.mtp import MtpOptions
from draftsmith.heads.peagle import PEagleOptions
from draftsmith.heads.registry import methods
from draftsmith.heads.xpress import XPressOptions
from tests.exports import replace_layout
from tests.models import make_target
from tests.natives import EXPERTS

pytestmark = pytest.mark.full

VOCAB = torch.arange(0, 96, 2)
SPECS: dict[str, tuple[str, Any, torch.Tensor | None]] = {
    "dflash": (
        "dflash",
        DFlashOptions(layer_ids=[0, 1, 2], block_size=4, num_layers=2, mask_token_id=0, anchors=6),
        None,
    ),
    "dspark": (
        "dspark",
        DSparkOptions([1, 2], 48, block_size=3, num_layers=1, mask_token_id=0, anchors=6, markov_rank=8),
        VOCAB,
    ),
    "dflash, draft vocabulary": (
        "dflash",
        DFlashOptions([1, 2], 48, block_size=3, num_layers=1, mask_token_id=0, anchors=6),
        VOCAB,
    ),
    "dflash2": (
        "dflash2",
        DFlash2Options(
            [1, 2],
            block_size=4,
            num_layers=2,
            mask_token_id=0,
            anchors=6,
            conv_group_size=8,
            selector_rank=8,
            selector_top_k=5,
        ),
        None,
    ),
    "dflash, variable prefix": (
        "dflash",
        DFlashOptions([1, 2], None, 5, 0, 2, 6, variable_prefix=1),
        None,
    ),
    "dflash2, window": (
        "dflash2",
        DFlash2Options(
            [1, 2],
            None,
            4,
            0,
            1,
            6,
            conv_kernel_size=3,
            conv_group_size=4,
            selector_rank=4,
            selector_top_k=4,
            sliding_window=7,
        ),
        None,
    ),
    "domino": (
        "domino",
        DominoOptions([1, 2], None, 3, 0, 1, 6, gru_hidden_dim=12, emb_dim=8),
        None,
    ),
    "domino, tokens in place": (
        "domino",
        DominoOptions([1, 2], None, 4, 0, 1, 6, gru_hidden_dim=8, emb_dim=4, shift_label=False),
        None,
    ),
    "dspark, not confident": (
        "dspark",
        DSparkOptions([0, 2], block_size=4, num_layers=2, mask_token_id=0, markov_rank=4, confidence_head=False),
        None,
    ),
    "eagle3": ("eagle3", Eagle3Options(layer_ids=[0, 1, 2], ttt_steps=3, draft_vocab_size=48), VOCAB),
    "eagle3, norms": (
        "eagle3",
        Eagle3Options(layer_ids=[1, 2], ttt_steps=2, norm_before_residual=True, fc_norm=True, norm_output=True),
        None,
    ),
    "draft model": ("draft_model", DraftLmOptions(num_hidden_layers=1, hidden_size=16), None),
    "draft model of the target's layers": ("draft_model", DraftLmOptions(layers_from_target=[0, 2]), None),
    "eagle3, layers, width, window": (
        "eagle3",
        Eagle3Options([0, 1, 2], 48, 3, num_hidden_layers=3, hidden_size=24, train_embeddings=True, sliding_window=7),
        VOCAB,
    ),
    "eagle1": ("eagle1", Eagle1Options(fc_bias=True, qkv_bias=True), None),
    "hass": ("eagle1", Eagle1Options(aligned_passes=3), None),
    "hydra": ("hydra", HydraOptions(num_heads=3), None),
    "hydra++": ("hydra", HydraOptions(3, 4, tie_blocks=True, prefix_attention=True, dropout=0.2), None),
    "hydra, the target's projection": (
        "hydra",
        HydraOptions(2, 2, prefix_attention=True, original_lm_head=True, lm_head_bias=False),
        None,
    ),
    "jetspec": (
        "jetspec",
        JetSpecOptions([1, 2], 48, block_size=4, num_layers=2, mask_token_id=0, anchors=6),
        VOCAB,
    ),
    "medusa": ("medusa", MedusaOptions(num_heads=3), None),
    "medusa, the target's projection": ("medusa", MedusaOptions(2, 2, original_lm_head=True), None),
    "medusa2": ("medusa2", Medusa2Options(num_heads=3, lora_r=8), None),
    "medusa2, the projection too": (
        "medusa2",
        Medusa2Options(2, original_lm_head=True, target_modules=["q_proj", "down_proj"], tune_lm_head=True),
        None,
    ),
    "mtp": ("mtp", MtpOptions(), None),
    "mtp, keys of its step": ("mtp", MtpOptions(step_keys=True, qk_norm=True), None),
    "mtp, the target's layer": ("mtp", MtpOptions(layer="target"), None),
    "peagle": ("peagle", PEagleOptions([0, 1, 2], 48, depths=4, num_hidden_layers=2), VOCAB),
    "peagle, width, window, low rank": (
        "peagle",
        PEagleOptions(
            [1, 2],
            depths=3,
            num_hidden_layers=1,
            hidden_size=24,
            train_embeddings=True,
            sliding_window=7,
            lm_head_rank=8,
        ),
        None,
    ),
    "xpress": (
        "xpress",
        XPressOptions([1, 2], None, 4, 0, 2, 6, xpress_rank=8, xpress_mlp_hidden=12),
        None,
    ),
    "another package's": ("bigram", None, None),
}
_TINY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2}


def spec(name: str, **changes: Any) -> Spec:
    """A spec whose head nothing has made yet."""
    method, options, vocab = SPECS[name]
    target = make_target("deepseek", **_TINY, **EXPERTS) if getattr(options, "layer", None) else tiny_target()
    return Spec(method, options, target, vocab, **changes)


VARIANTS = {
    "dflash, draft vocabulary",
    "dflash, variable prefix",
    "dflash2, window",
    "domino, tokens in place",
    "dspark, not confident",
    "draft model of the target's layers",
    "eagle3, layers, width, window",
    "eagle3, norms",
    "hass",
    "hydra++",
    "hydra, the target's projection",
    "medusa, the target's projection",
    "medusa2, the projection too",
    "mtp, keys of its step",
    "mtp, the target's layer",
    "peagle, width, window, low rank",
}
"""Further heads of methods that another spec is of already."""
RELATIVES = {"dflash2", "domino", "dspark", "jetspec", "medusa2", "peagle", "xpress"}
"""Methods that share most of their code with dflash, medusa and eagle3."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS | RELATIVES else name for name in SPECS]
)
def test_conformance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spec(name)
    if name == "another package's":
        from tests.toy_drafter import METHOD, BigramOptions

        monkeypatch.setitem(methods(), "bigram", METHOD)
        made = replace(made, options=BigramOptions(), learning_rate=0.1)
    run_conformance(made)


@pytest.mark.slow
def test_every_layout_gives_a_head_back() -> None:
    ours = {name: method for name, (method, *_) in SPECS.items() if method in methods()}
    taken = {layout for name in ours for layout in check_layouts(spec(name, steps=0))}
    assert taken == {layout for method in ours.values() for layout in layouts_of(method)}


def wrong_rotary(patch: pytest.MonkeyPatch) -> None:
    """Drafted rows stand one position further on than in training."""
    real = LayerCache.rotations_apart
    patch.setattr(LayerCache, "rotations_apart", lambda self, count, longest: real(self, count + 1, longest)[1:])


def all_seen(patch: pytest.MonkeyPatch) -> None:
    """Decoding sees the whole text whatever the window."""
    real = LayerCache.__init__
    patch.setattr(
        LayerCache, "__init__", lambda self, module, rows, capacity, window: real(self, module, rows, capacity)
    )


def one_too_wide(patch: pytest.MonkeyPatch) -> None:
    """Decoding sees a token more than the window."""
    real = LayerCache.__init__
    patch.setattr(LayerCache, "__init__", lambda self, *sizes: real(self, *sizes[:3], sizes[3] and sizes[3] + 1))


def lost_feedback(patch: pytest.MonkeyPatch) -> None:
    """A drafted token's row reads no hidden state."""
    real = EagleDrafter._grow
    patch.setattr(
        EagleDrafter, "_grow", lambda self, length, tokens, h, *more: real(self, length, tokens, h * 0, *more)
    )


def stale_state(patch: pytest.MonkeyPatch) -> None:
    """Drafts are made from the first of several accepted tokens instead of the last."""
    real = MedusaDrafter.propose
    patch.setattr(
        MedusaDrafter,
        "propose",
        lambda self, state: real(
            self, replace(state, new_tokens=replace(state.new_tokens, count_B=state.new_tokens.count_B * 0))
        ),
    )


def most_likely_draws(patch: pytest.MonkeyPatch) -> None:
    """Drafts the most likely tokens, and says that they were drawn."""
    patch.setattr(growth, "draw", lambda probs, uniform: probs.argmax(-1))


def shorter_drafts(patch: pytest.MonkeyPatch) -> None:
    """Drafts one token less than asked for."""
    real = EagleDrafter._chain
    patch.setattr(EagleDrafter, "_chain", lambda self, state, out, depth: real(self, state, out, max(1, depth - 1)))


def leak(patch: pytest.MonkeyPatch) -> None:
    """Documents of a row see those before them."""
    real = plan.plan_rows
    patch.setattr(plan, "plan_rows", lambda document, rows: real(document.clamp(max=0), rows))


def every_row(patch: pytest.MonkeyPatch) -> None:
    """Prompts count as if they were answers."""
    real = DraftHead.supervised
    patch.setattr(
        DraftHead, "supervised", lambda self, batch: real(self, replace(batch, mask=torch.ones_like(batch.mask)))
    )


def unseeded(patch: pytest.MonkeyPatch) -> None:
    """Noise in training that no seed reaches."""
    real = Eagle3Head.initial_hidden

    def noisy(self: Any, aux: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        generator.seed()
        hidden = real(self, aux, last)
        return hidden + 0.01 * torch.randn(hidden.shape, generator=generator) * self.training

    patch.setattr(Eagle3Head, "initial_hidden", noisy)


def noise_by_turns(patch: pytest.MonkeyPatch) -> None:
    """Noise that depends on where in the batch a document lies."""

    def perturb(self: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        return hidden + 0.1 * torch.rand(hidden.shape, generator=torch.Generator().manual_seed(0))

    patch.setattr(Eagle1Head, "perturb", perturb)


def left_out(patch: pytest.MonkeyPatch) -> None:
    """A parameter that checkpoints do not hold."""
    real = Eagle3Head.state_dict

    def state_dict(self: Any, *args: Any, **options: Any) -> dict[str, Any]:
        return {name: value for name, value in real(self, *args, **options).items() if name != "norm.weight"}

    patch.setattr(Eagle3Head, "state_dict", state_dict)


def swapped_heads(patch: pytest.MonkeyPatch) -> None:
    """An export whose heads come back in another order."""
    layout = layouts()["medusa_tgi"]

    def load(path: Any, target: Any) -> Any:
        head = layout.load(path, target)
        head.blocks = torch.nn.ModuleList(reversed(head.blocks))
        return head

    replace_layout(patch, "medusa_tgi", load=load)


def neighbour(patch: pytest.MonkeyPatch) -> None:
    """A row's draft depends on the row above it."""
    real = MedusaDrafter.propose

    def propose(self: Any, state: Any) -> Any:
        mixed = state.new_tokens.last_BnD + 0.5 * state.new_tokens.last_BnD.roll(1, 0) * (len(state.root_B) > 1)
        return real(self, replace(state, new_tokens=replace(state.new_tokens, last_BnD=mixed)))

    patch.setattr(MedusaDrafter, "propose", propose)


def another_root(patch: pytest.MonkeyPatch) -> None:
    """The draft hangs on another token than the last one of the text."""
    real = MedusaDrafter.propose

    def propose(self: Any, state: Any) -> Any:
        draft = real(self, state)
        return replace(draft, tokens_BN=torch.cat([draft.tokens_BN[:, :1] ^ 1, draft.tokens_BN[:, 1:]], 1))

    patch.setattr(MedusaDrafter, "propose", propose)


def depths_by_turns(patch: pytest.MonkeyPatch) -> None:
    """In a tree the first depth takes the last one's head."""
    real = drafters.draft_tree
    patch.setattr(
        drafters,
        "draft_tree",
        lambda state, draft_probs, *args, **more: real(state, draft_probs.flip(1), *args, **more),
    )


def most_likely_children(patch: pytest.MonkeyPatch) -> None:
    """Drawn trees hold the most likely tokens, and say that they were drawn."""

    def chosen(draft_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        return draft_probs.topk(uniforms.shape[-1], -1).indices

    patch.setattr(drafters, "draw_children", chosen)


def with_replacement(patch: pytest.MonkeyPatch) -> None:
    """Each child of a node in a drawn tree is drawn as if the others were not there."""

    def drawn(draft_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        flat = draft_probs.flatten(0, -2)
        each = [draw(flat, column.flatten()) for column in uniforms.unbind(-1)]
        return torch.stack(each, -1).view(uniforms.shape)

    patch.setattr(drafters, "draw_children", drawn)


def no_trees(patch: pytest.MonkeyPatch) -> None:
    """A method that names trees, with a drafter that knows of none."""
    real = HeadDrafter.__init__
    patch.setattr(HeadDrafter, "__init__", lambda self, head, length: real(self, head, length))


def later_ends(patch: pytest.MonkeyPatch) -> None:
    """Drafts go on for longer than the rule says."""
    real = HeadDrafter.__init__

    def init(self: Any, *args: Any, rule: LengthRule | None = None, **options: Any) -> None:
        real(self, *args, rule=rule and LengthRule(tuple(0.5 * floor for floor in rule.floors)), **options)

    patch.setattr(HeadDrafter, "__init__", init)


def silent_ends(patch: pytest.MonkeyPatch) -> None:
    """A head whose training pass does not say what its drafter is sure of."""
    real = DSparkHead.outputs
    patch.setattr(DSparkHead, "outputs", lambda self, *args: [replace(s, temperature=None) for s in real(self, *args)])


def other_confidence(patch: pytest.MonkeyPatch) -> None:
    """An export that gives the head back with another confidence."""
    layout = layouts()["dspark"]

    def load(path: Any, target: Any) -> Any:
        head = layout.load(path, target)
        head.confidence_head.proj.bias.data += 1.0
        return head

    replace_layout(patch, "dspark", load=load)


OTHER_PROBS, NOT_DRAWN = "differ from the training pass|not the training pass", "not drawn from the probabilities"
WITH_TREE = "greedy answers with a .* tree differ from the target's own"
DECODING, TREES, DRAWN = (
    "decoding has the probabilities of training",
    "trees keep greedy text and acceptance",
    "drawn trees are drawn from the probabilities that they name",
)
MUTANTS: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None], str]] = [
    (DECODING, "eagle3", wrong_rotary, OTHER_PROBS),
    (DECODING, "eagle3", lost_feedback, OTHER_PROBS),
    (DECODING, "eagle1", lost_feedback, OTHER_PROBS),
    (DECODING, "medusa", stale_state, OTHER_PROBS),
    ("drafts are drawn from the probabilities that they name", "eagle3", most_likely_draws, NOT_DRAWN),
    ("simulated acceptance equals decoded acceptance", "eagle3", shorter_drafts, "differ at temperature 0"),
    *(
        ("drafts end where a rule says", m, later_ends, "differ at temperature 0 where a rule")
        for m in ("dspark", "medusa", "eagle3")
    ),
    ("drafts end where a rule says", "dspark", silent_ends, "differ at temperature 0 where a rule ends drafts"),
    *(
        ("a window narrows attention", m, mutant, "differ at temperature 0 with a window")
        for m, mutant in (("eagle3", all_seen), ("dflash", one_too_wide), ("mtp", one_too_wide))
    ),
    ("packed documents train like single ones", "eagle3", leak, "between documents packed and alone"),
    ("packed documents train like single ones", "eagle1", noise_by_turns, "in training, between documents packed and"),
    ("logits come for the supervised rows", "medusa", every_row, "other rows than"),
    ("the same seed trains the same head", "eagle3", unseeded, "same seed differ"),
    ("a checkpoint restores the head", "eagle3", left_out, "differs in norm.weight"),
    ("an export restores the head", "medusa", swapped_heads, "gives other logits"),
    ("an export restores the head", "dspark", other_confidence, "gives other confidences"),
    ("rows of a batch are independent", "medusa", neighbour, "differ.* between a batch and alone"),
    ("greedy text is the target's own", "medusa", another_root, "greedy answers differ from the target's own"),
    (TREES, "medusa", another_root, WITH_TREE),
    (TREES, "medusa", depths_by_turns, "rounds differ with a static tree"),
    (TREES, "medusa", no_trees, "names best_first trees, but its drafter takes none"),
    (DRAWN, "medusa", most_likely_children, NOT_DRAWN),
    (DRAWN, "medusa", with_replacement, NOT_DRAWN),
    (DRAWN, "medusa", depths_by_turns, "differ from the training pass"),
]


def test_every_method_has_a_spec() -> None:
    assert {method for method, *_ in SPECS.values()} >= set(methods())


def test_every_check_has_a_mutant() -> None:
    assert {check for check, *_ in MUTANTS} == set(CHECKS)


def test_every_promise_of_a_head_has_a_check() -> None:
    told = [line.strip() for line in (DraftHead.__doc__ or "").splitlines()]
    promises = [line.removeprefix("- ").partition(":")[0] for line in told if line.startswith("- ")]
    assert promises == list(CHECKS)


def test_the_message_names_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    every_row(monkeypatch)
    monkeypatch.setattr(suite, "CHECKS", {name: CHECKS[name] for name in ("logits come for the supervised rows",)})
    with pytest.raises(
        AssertionError, match=r"^The method medusa breaks the promise 'logits come for the supervised rows': "
    ):
        run_conformance(spec("medusa"))


@pytest.mark.parametrize(
    ("check", "name", "mutant", "words"), MUTANTS, ids=[f"{m.__name__}-{n}" for _, n, m, _ in MUTANTS]
)
@pytest.mark.slow
def test_a_broken_drafter_is_found(
    check: str, name: str, mutant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=words) as caught:
        CHECKS[check](spec(name))
    assert "\n" not in str(caught.value)


def test_a_head_that_calls_itself_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods(), "twin", methods()["medusa"])
    with pytest.raises(AssertionError, match="A head of twin calls itself medusa"):
        CHECKS["a checkpoint restores the head"](Spec("twin", MedusaOptions(2), tiny_target()))
