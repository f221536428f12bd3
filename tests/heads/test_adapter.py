"""Adapters of heads: the gradients of low-rank sums, peft's files, and folders that are heads again."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrize import cached, is_parametrized

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.heads.adapter import DraftAdapter, adapt, merged, save_adapter
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.recognise import head_digest, load_head, recognise
from draftsmith.heads.losses.head_loss import head_loss
from draftsmith.heads.losses.spec import LossSpec
from draftsmith.heads.registry import methods
from draftsmith.heads.warm_start import adopt_options, restart
from draftsmith.recipe.schema import TrainSpec
from draftsmith.storage import sha256_file
from draftsmith.target.target import Target, load_target
from draftsmith.train.schedule import build_optimizers
from tests import models
from tests.batches import documents_of, pack
from tests.exports import make_eagle3, make_medusa, make_target
from tests.models import SMALL_HEADS
from tests.workplace import digests, make_workplace, options

pytestmark = pytest.mark.full
SPEC = DraftAdapter(4, 6.0, Path("base"), "0")


def loss_of(head, target: Target) -> torch.Tensor:
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    with cached():  # as in training
        output = head(batch, head.trains.steps)
    return head_loss(output, batch, target.head, head.draft_vocab, LossSpec()).loss_sum


@pytest.mark.parametrize("method", [name for name in methods() if name != "medusa2"])
def test_an_adapter_has_the_gradients_of_the_matrices_that_it_adds_to(method: str) -> None:
    """dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW, where W is the sum; whatever way a head takes to multiply by W."""
    target, options_class = make_target(), methods()[method].options_class
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        head = methods()[method].build(options_class(**SMALL_HEADS.get(method, {})), target, None).train()
        own = head.state_dict()
        plain = copy.deepcopy(head)
        adapt(head, SPEC)
        with torch.no_grad():
            for name, one in head.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(one, std=0.05)
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    (optimizer,) = build_optimizers(head, TrainSpec(warm_start="x", lora_rank=4))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(trained)
    assert not [name for name, p in trained.items() if "lora_B" in name and len(p) == target.vocab_size]
    sums = merged(head.state_dict(), SPEC)
    assert sums.keys() == own.keys()
    plain.load_state_dict(sums)
    for one in (head, plain):
        loss_of(one, target).backward()
    found = 0
    for name, p in trained.items():
        if not name.endswith("lora_B"):
            continue
        path = name.removesuffix(".parametrizations.weight.0.lora_B")
        a, b, full = trained[name.replace("lora_B", "lora_A")], p, plain.get_parameter(f"{path}.weight").grad
        assert None not in (full, a.grad, b.grad), path
        for grad, expected in ((b.grad, 1.5 * full @ a.detach().T), (a.grad, 1.5 * b.detach().T @ full)):
            assert float((grad - expected).norm()) <= 1e-5 * float(expected.norm()), path
        found += bool(full.any())
    assert found


def test_what_cannot_be_adapted_is_refused() -> None:
    target = make_target()
    tuned = methods()["medusa2"]
    head = tuned.build(tuned.options_class(**SMALL_HEADS["medusa2"]), target, None)
    with pytest.raises(
        UserError, match=r"^train\.lora_rank is 4, but this medusa2 head tunes its target by an adapter"
    ):
        adapt(head, SPEC)
    bare = make_medusa(target)
    bare._modules.clear()
    with pytest.raises(UserError, match="this medusa head has no linear layers to adapt"):
        adapt(bare, SPEC)
    head = make_eagle3(target, None)
    head.options = replace(head.options, train_embeddings=True)
    with pytest.raises(
        UserError, match=r"head\.train_embeddings is true, and an adapter leaves embeddings as they are"
    ):
        adapt(head, SPEC)


@pytest.mark.parametrize(
    ("method", "before", "after"),
    [
        ("dflash", {"block_size": 4, "mask_token_id": 5}, {"variable_prefix": 1}),
        ("mtp", {"layer": "target"}, {"target_state": "vllm"}),
    ],
)
def test_an_adapter_is_loaded_with_the_options_that_it_was_trained_with(
    method: str, before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    """Which decide what the head computes, and may be others than its base's."""
    target, of = models.make_target("glm4_moe" if method == "mtp" else "llama"), methods()[method]
    save_head(of.build(of.options_class(**before), target, None), tmp_path / "base", target)
    base = load_head(tmp_path / "base", target)
    options = adopt_options(of.options_class(**before, **after), base, target, "base")
    spec = replace(SPEC, base=tmp_path / "base", digest=head_digest(tmp_path / "base"))
    head = adapt(restart(base, options, target), spec).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    save_adapter(head, tmp_path / "adapter", target, head.state_dict())
    batch = pack(target, documents_of(target), head.reads.layer_ids)
    trained, loaded, own = (
        torch.cat([step.logits for step in one(batch, 3).steps])
        for one in (head, load_head(tmp_path / "adapter", target), base)
    )
    torch.testing.assert_close(loaded, trained, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(loaded, own, atol=1e-2)


def test_a_layer_as_long_as_the_draft_vocabulary_is_adapted() -> None:
    target = make_target()
    adapted = []
    for size in (target.config.hidden_size, target.config.hidden_size + 1):
        head = adapt(make_eagle3(target, torch.arange(size)), SPEC)
        adapted.append([name for name, module in head.named_modules() if is_parametrized(module)])
    assert adapted[0] == adapted[1]
    assert any(name.endswith("q_proj") for name in adapted[0])
    assert "lm_head" not in adapted[0]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature with a head, and a run that trains an adapter on it for a domain."""
    folder = make_workplace(tmp_path_factory.mktemp("adapter"))
    target = load_target(str(folder / "target"))
    save_head(make_eagle3(target, torch.arange(0, target.vocab_size, 2)), folder / "head", target)
    assert main(["train", *words(folder, folder / "run")]) == 0
    return folder


def words(workplace: Path, run: Path, *more: str) -> list[str]:
    settings = {
        "warm_start": workplace / "head",
        "lora_rank": 3,
        "optimizer": "adamw",
        "lr": 3e-2,
        "max_steps": 8,
        "evaluations": 2,
    }
    ours = ["--head.layer_ids", "null", "--head.draft_vocab_size", "null", "--features.source", "online"]
    train = (word for key, value in settings.items() for word in (f"--train.{key}", str(value)))
    return [*options(workplace, run), *ours, "--answers.max_new_tokens", "6", *train, *more]


def test_the_best_head_is_the_base_with_the_adapter(workplace: Path) -> None:
    target, train = load_target(str(workplace / "target")), workplace / "run" / "train"
    base, best = (load_file(folder / "model.safetensors") for folder in (workplace / "head", train / "best"))
    lines = [json.loads(line) for line in (train / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["tau"]["overall"] > lines[0]["tau"]["overall"]
    assert base.keys() == best.keys()
    moved = {name for name in base if not torch.equal(base[name], best[name])}
    assert {"fc.weight", "layers.0.mlp.up_proj.weight"} <= moved
    assert not {name for name in moved if "norm" in name or "lm_head" in name or "embed" in name}
    for name in moved:
        assert int(torch.linalg.matrix_rank(best[name] - base[name], rtol=1e-3)) <= 3, name
    # peft makes the same sums of its files.
    head = load_head(workplace / "head", target)
    peft = PeftModel.from_pretrained(head, str(train / "adapter")).merge_and_unload()
    assert {
        name: bool((x == best[name]).all()) for name, x in peft.state_dict().items() if name in moved
    } == dict.fromkeys(moved, True)
    # The folder of the adapter is a head too, and weighs little.
    assert recognise(train / "adapter").name == "an adapter of a head"
    again = load_head(train / "adapter", target)
    assert all(torch.equal(x, best[name]) for name, x in again.state_dict().items() if name in best)
    assert (
        sum(file.stat().st_size for file in (train / "adapter").iterdir())
        < (train / "best" / "model.safetensors").stat().st_size
    )


def test_a_run_goes_to_the_export_of_the_merged_head(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["run", *words(workplace, tmp_path / "run", "--train.max_steps", "2", "--evaluate.temperatures", "[0.0]")]
    assert main([*run, "--export.dtype", "float32"]) == 0
    assert "not exported" not in capsys.readouterr().err
    best, exported = (
        load_file(tmp_path / "run" / name / "model.safetensors") for name in ("train/best", "export/eagle3")
    )
    assert torch.equal(best["fc.weight"], exported["fc.weight"])


def test_a_training_again_takes_the_adapter_of_the_last_one_away(workplace: Path, tmp_path: Path) -> None:
    """It would be measured as that of the new head."""
    shutil.copytree(workplace / "run", tmp_path / "run")
    assert (tmp_path / "run" / "train" / "adapter").is_dir()
    files = json.loads((tmp_path / "run" / "run.json").read_text())["train"]["files"]
    assert "train/adapter/adapter_model.safetensors" in files
    again = words(workplace, tmp_path / "run", "--train.lora_rank", "null", "--redo", "train")
    assert main(["train", *again]) == 0
    assert (tmp_path / "run" / "train" / "best").is_dir()
    assert not (tmp_path / "run" / "train" / "adapter").exists()


def test_adapters_are_measured_beside_their_base(workplace: Path) -> None:
    beside = [
        "--evaluate.beside.base",
        str(workplace / "head"),
        "--evaluate.beside.kept",
        str(workplace / "run" / "train" / "adapter"),
    ]
    assert main(["evaluate", "--no-decode", *words(workplace, workplace / "run", *beside)]) == 0
    found = json.loads((workplace / "run" / "simulation" / "t0" / "result.json").read_text())["drafters"]
    own, base, kept = (found[name]["overall"]["tau_simulated"] for name in ("eagle3", "base", "kept"))
    assert own == kept > base


def test_an_adapter_that_names_its_base_by_the_weights_alone_is_loaded(workplace: Path, tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    shutil.copytree(workplace / "run" / "train" / "adapter", tmp_path / "adapter")
    file = tmp_path / "adapter" / "config.json"
    config = json.loads(file.read_text())
    weights = sha256_file(workplace / "head" / "model.safetensors")[:16]
    assert config["adapter"]["digest"] != weights
    file.write_text(json.dumps(config | {"adapter": config["adapter"] | {"digest": weights}}))
    load_head(tmp_path / "adapter", load_target(str(workplace / "target")))


def test_an_adapter_of_another_head_is_refused(workplace: Path, tmp_path: Path) -> None:
    target, adapter = load_target(str(workplace / "target")), tmp_path / "adapter"
    shutil.copytree(workplace / "run" / "train" / "adapter", adapter)
    config = json.loads((adapter / "config.json").read_text())
    assert Path(config["adapter"]["base"]) == workplace / "head"
    assert config["adapter"]["digest"] == head_digest(workplace / "head")

    def refused(words: str, **changes: object) -> None:
        facts = {key: value for key, value in (config["adapter"] | changes).items() if value is not None}
        (adapter / "config.json").write_text(json.dumps(config | {"adapter": facts}))
        with pytest.raises(UserError, match=words) as caught:
            load_head(adapter, target)
        assert "\n" not in str(caught.value)

    save_head(
        make_eagle3(target, torch.arange(0, target.vocab_size, 2), intermediate_size=48), tmp_path / "other", target
    )
    other = str(tmp_path / "other")
    refused("is an adapter of another head than .*other is now", base=other)
    refused(
        "holds an adapter of layers.0.mlp.*which does not fit the head", base=other, digest=head_digest(Path(other))
    )
    refused("is an adapter of the head .*nowhere, which is not there: put it back", base=str(tmp_path / "nowhere"))
    refused("adapter.rank is missing or no value for it", rank="3")
    refused("adapter.rank is missing or no value for it", rank=0)
    refused("adapter.digest is missing", digest=None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--train.warm_start", "null"], "train.lora_rank is 3: an adapter changes a head that is trained"),
        (["--train.optimizer", "muon"], "the factors of train.lora_rank are no matrices for Muon"),
        (
            ["--train.lora_rank", "null", "--train.lora_alpha", "8"],
            "there is no adapter to scale without train.lora_rank",
        ),
    ],
)
def test_a_mistake_is_one_sentence_before_any_work(
    more: list[str], said: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(tmp_path)
    assert main(["train", *words(workplace, tmp_path / "new", *more)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("draftsmith: ")]
    assert said in line
    assert digests(tmp_path) == before
