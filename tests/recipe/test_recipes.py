"""The recipes for published models: their comments are what the formulas give, and their heads build, train and decode.

The configs under fixtures/configs hold the published dimensions; the models that run here have the same architecture,
RoPE and layer pattern at a width of 64.
"""

import json
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from draftsmith.decoder.answers import Request
from draftsmith.decoder.decode import decode_batch
from draftsmith.decoder.draft import TargetAlone
from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.selfcheck import check_decoding
from draftsmith.estimate.estimate import comment
from draftsmith.estimate.estimator import assume, make_estimate
from draftsmith.estimate.figures import Estimate, find_device
from draftsmith.heads.draft_model import head as draft_model_head
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.registry import methods
from draftsmith.recipe.parse import parse_recipe
from draftsmith.recipe.schema import Recipe
from draftsmith.target.pretrained import check_target
from draftsmith.target.shape import TargetShape, shape_of
from draftsmith.target.target import Target
from tests.batches import documents_of, pack

pytestmark = pytest.mark.full

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CONFIGS = Path(__file__).resolve().parents[1] / "fixtures" / "configs"
MODELS = sorted(path.stem for path in CONFIGS.glob("*.json"))
NAMES = sorted(
    str(path.relative_to(RECIPES).with_suffix(""))
    for path in RECIPES.glob("*/*.yaml")
    if path.stem.endswith(tuple(MODELS))
)
SMALL = sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.glob("*/smollm2-135m.yaml"))
"""For a CPU: what they take is measured, not computed (`draftsmith plan`)."""


@pytest.fixture(autouse=True)
def _draft_models_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        draft_model_head, "load_config", lambda path, what: config(f"drafts/{path.split('/')[1].lower()}")
    )


def model_of(name: str) -> str:
    """The target of a recipe."""
    return next(model for model in (*MODELS, "smollm2-135m") if name.endswith(model))


def test_every_drafter_has_a_tiny_recipe_and_if_it_has_others_one_for_8b() -> None:
    sizes = ("tiny", "llama-3.1-8b-instruct")
    sized = set()
    for method in methods():
        names = {path.stem for path in (RECIPES / method).glob("*.yaml")}
        kinds = {name.removesuffix("tiny") for name in names if name.endswith("tiny")}
        assert "" in kinds
        if names != {"tiny"}:
            assert names >= {kind + size for kind in kinds for size in sizes}
            sized.add(method)
        assert all(
            any(name.removeprefix(kind) in (*sizes, *MODELS, "smollm2-135m") for kind in kinds) for name in names
        )
    assert {"eagle3", "medusa"} <= sized


@lru_cache
def load(name: str) -> Recipe:
    return parse_recipe(["--recipe", str(RECIPES / f"{name}.yaml")])


def config(name: str, **changes: Any) -> PreTrainedConfig:
    values = {**json.loads(next(CONFIGS.rglob(f"{name}.json")).read_text()), **changes}
    return AutoConfig.for_model(values.pop("model_type"), **values)


@lru_cache
def shape(model: str) -> TargetShape:
    return shape_of(config(model), 2)


def plan(name: str) -> Estimate:
    recipe = load(name)
    assert recipe.data.limit is not None
    target = shape(model_of(name))
    return make_estimate(
        recipe, target, recipe.data.limit, replace(assume(recipe, target, find_device("h100")), gpus=8)
    )


@pytest.mark.parametrize(
    ("model", "parameters", "active"),
    # As published: 8.19 and 8.03 billion; 20.9 billion of which 3.6 are active, the lookup of the input left out.
    [("qwen3-8b", 8.19, 7.57), ("llama-3.1-8b-instruct", 8.03, 7.50), ("gpt-oss-20b", 20.9, 3.6)],
)
def test_the_configs_are_those_of_the_published_models(model: str, parameters: float, active: float) -> None:
    assert shape(model).parameters == pytest.approx(1e9 * parameters, rel=0.005)
    assert shape(model).active == pytest.approx(1e9 * active, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_comment_is_what_the_formulas_give(name: str) -> None:
    """Mend it with: draftsmith plan --recipe R --device h100 --gpus 8 --comment (and --target.path for a config at hand)."""
    text = (RECIPES / f"{name}.yaml").read_text()
    figures = comment(plan(name))
    assert figures.count("\n") > 5
    assert figures in text


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_its_devices(name: str) -> None:
    made = plan(name)
    for needed in (made.answer_bytes, made.train_bytes, made.evaluate_bytes):
        assert needed < 0.9 * made.given.device.memory
    # Why hidden states are stored or not: what the disks of a machine hold, and give.
    stored = made.recipe.features.source == "store"
    assert stored == (made.store_bytes < 1e12 and made.read_rate < 5e9)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("medusa")])
def test_why_medusa_uses_the_targets_projection(name: str) -> None:
    made = plan(name)
    own = replace(made.recipe, head=replace(made.recipe.head, original_lm_head=False))
    needed = make_estimate(own, made.target, made.samples, made.given).train_bytes
    extra, shared = 5 * made.target.vocab * made.target.hidden, made.head.matrices
    text = " ".join(line.lstrip("# ") for line in (RECIPES / f"{name}.yaml").read_text().splitlines())
    assert f"would be {extra / 1e9:.1f}B parameters" in text
    if name.startswith("medusa2"):  # "fill a GPU"
        assert needed > 0.9 * made.given.device.memory
    else:
        assert f"parameters, whose training takes {needed / 1e9:.0f} GB of each GPU" in text
    assert f"are {extra / shared:.0f} times what the residual blocks hold" in text


@lru_cache
def small_target(model: str) -> Target:
    """The architecture of `model`, 8 layers of width 64, random weights in float32."""
    published = config(model)
    few = {
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 160,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "quantization_config": None,
    }
    if model == "gpt-oss-20b":
        few |= {"num_local_experts": 8, "layer_types": list(published.layer_types[:8]), "sliding_window": 4}
    torch.manual_seed(0)
    attention = load(f"eagle3/{model}").target.attn_implementation
    made = AutoModelForCausalLM.from_config(config(model, **few), attn_implementation=attention, dtype=torch.float32)
    return Target(made, path=model, fingerprint="0")


@pytest.mark.parametrize("model", MODELS)
def test_the_architectures_can_be_targets_and_are_decoded_exactly(model: str) -> None:
    target = small_target(model)
    check_target(target)
    check_decoding(target)
    assert all(load(f"{m}/{model}").target.attn_implementation for m in ("eagle3", "medusa"))


@pytest.mark.parametrize("name", [*NAMES, *SMALL])
@pytest.mark.slow
def test_a_head_of_the_recipe_builds_trains_and_decodes(name: str) -> None:
    recipe, target = load(name), small_target(model_of(name))
    method, options = methods()[recipe.method], recipe.head
    vocab = None
    if recipe.method == "peagle":
        options, vocab = replace(options, draft_vocab_size=100, mask_token_id=7), torch.arange(100)
    if recipe.method == "eagle3":
        width = options.intermediate_size and options.intermediate_size * 64 // 2880
        options, vocab = replace(options, intermediate_size=width, draft_vocab_size=100), torch.arange(100)
    if recipe.method in ("dflash", "dflash2", "domino", "dspark", "jetspec", "xpress"):
        options = replace(options, layer_ids=None, draft_vocab_size=100, mask_token_id=7)
        vocab = torch.arange(100)
    if recipe.method == "draft_model":
        layers = options.layers_from_target and [0, 7]
        options = replace(options, init_from=None, layers_from_target=layers, hidden_size=None if layers else 32)
    torch.manual_seed(0)
    head = method.build(options, target, vocab)
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    output = head(batch, head.trains.steps)
    scored = head_loss(output, batch, target.head, head.draft_vocab, recipe.train.loss)
    scored.loss_sum.backward()
    trained = [p for p in head.parameters() if p.requires_grad]
    assert torch.isfinite(scored.loss_sum)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trained)
    requests = [Request(str(i), "chat", tuple(range(5 + i, 15 + i)), 12) for i in range(2)]
    drafter = method.make_drafter(head.eval(), recipe.evaluate.num_speculative_tokens)
    drafted = decode_batch(target, drafter, requests, Sampling(0.0))
    alone = decode_batch(target, TargetAlone(), requests, Sampling(0.0))
    assert [g.output_ids for g in drafted.generations] == [g.output_ids for g in alone.generations]


@pytest.mark.parametrize("name", [name for name in (*NAMES, *SMALL) if not name.startswith("eagle3/")])
def test_the_recipes_of_a_model_give_the_same_answers(name: str) -> None:
    """They differ in how many, and could share a data_dir."""
    eagle3, other = load(f"eagle3/{model_of(name)}"), load(name)
    assert eagle3.target == other.target
    assert eagle3.answers == other.answers
    assert replace(eagle3.data, limit=None) == replace(other.data, limit=None)
    assert eagle3.evaluate.prompts == other.evaluate.prompts


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recipe_says_besides(name: str) -> None:
    recipe = load(name)
    assert recipe.export.layout in layouts_of(recipe.method)
    assert recipe.tracking.wandb == "offline"
    assert f"recipes/{name}.yaml" in (RECIPES / f"{name}.yaml").read_text()
    method, own = name.split("/")  # eagle3.1's recipes name their method themselves
    assert asdict(recipe)["name"] == (own if own.startswith(method) else f"{method}-{own}".replace("_", "-"))
    templates = {"qwen3-8b": {"enable_thinking": False}, "gpt-oss-20b": {"reasoning_effort": "low"}}
    assert recipe.data.template == templates.get(model_of(name), {})


@pytest.mark.parametrize("name", SMALL)
def test_the_recipes_of_a_small_model_share_one_store(name: str) -> None:
    recipe, eagle3 = load(name), load("eagle3/smollm2-135m")
    read = getattr(recipe.head, "layer_ids", None) or recipe.features.layer_ids or (2, 15, 27)
    assert tuple(read) == (2, 15, 27), "EAGLE-3's of 30 layers"
    assert recipe.data == eagle3.data
    assert replace(recipe.features, layer_ids=None) == eagle3.features
    assert recipe.data_path == eagle3.run_dir
    assert recipe.train.epochs == eagle3.train.epochs
    assert f"--method {recipe.method}`" in (RECIPES / f"{name}.yaml").read_text() or recipe == eagle3
