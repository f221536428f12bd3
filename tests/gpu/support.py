"""What the tests on a GPU share."""

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.data.batch import Tokenized
from draftsmith.data.features.extract import OnlineSource
from draftsmith.heads.base import DraftHead
from draftsmith.heads.registry import methods
from draftsmith.recipe.schema import AnswersSpec, EvaluateSpec, Recipe, TrainSpec
from draftsmith.target.target import Target
from draftsmith.train.schedule import TrainData
from tests.models import SMALL_HEADS, tiny_model

DEVICE = torch.device("cuda")
LAYERS = (2, 4, 6)
OPTIONS: dict[str, Any] = {
    name: method.options_class(**SMALL_HEADS.get(name, {}))
    for name, method in methods().items()
    if name != "medusa2" or find_spec("peft")
}
"""A small head of every method, of three steps or more."""

# On a pretended GPU they take seconds each.
on_gpu = [pytest.mark.gpu, *([] if torch.cuda.is_available() else [pytest.mark.slow])]


def make_target(device: torch.device | str = DEVICE, dtype: torch.dtype = torch.float32, **overrides: object) -> Target:
    """The same tiny Llama on any device."""
    return Target(tiny_model("llama", **overrides).to(device, dtype), path="tiny", fingerprint="0")


@cache
def make_texts(count: int = 24, new_tokens: int = 20) -> list[Tokenized]:
    """Greedy texts of four prompts, by the target on the CPU: easy to learn."""
    model, texts, samples = make_target("cpu").model, [], []
    for first in range(3, 7):
        prompt = torch.tensor([[first, 7, 9]])
        texts.append(model.generate(prompt, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)[0])
    for i in range(count):
        ids = texts[i % 4]
        samples.append(Tokenized(ids, torch.arange(len(ids)) >= 3, f"s{i}", ("chat", "code")[i % 2]))
    return samples


def make_data(target: Target, samples: list[Tokenized]) -> TrainData:
    """All but the last four samples to learn from."""
    count = len(samples)
    return TrainData(OnlineSource(target, samples, LAYERS), list(range(count - 4)), list(range(count - 4, count)))


def make_recipe(*, epochs: int = 8, precision: str = "no") -> Recipe:
    """A short training."""
    spec = TrainSpec(
        epochs=epochs,
        row_tokens=64,
        rows=2,
        lr=3e-3,
        muon_lr=0.01,
        optimizer="muon",
        precision=precision,
        evaluations=2,
    )
    return Recipe(answers=AnswersSpec(temperature=0.0), evaluate=EvaluateSpec(num_speculative_tokens=3), train=spec)


def make_head(target: Target, method: str, draft_vocab: Tensor | None = None) -> DraftHead:
    """An untrained head of three steps; the same on every device."""
    # The random numbers of the CPU: a GPU has its own.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = methods()[method].build(
            OPTIONS[method], make_target("cpu"), None if draft_vocab is None else draft_vocab.cpu()
        )
    head = methods()[method].build(OPTIONS[method], target, draft_vocab)
    head.load_state_dict(model.state_dict())
    return head
