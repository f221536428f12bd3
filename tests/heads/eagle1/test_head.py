"""EAGLE-1: the training pass is that of an independent slow reference; published folders in, mistakes refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import supervised_rows
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle1.head import Eagle1Head, Eagle1Options, build
from draftsmith.heads.formats.recognise import load_head
from draftsmith.target.pretrained import check_target
from draftsmith.target.target import Target, load_target
from tests.batches import documents_of, pack, same_logits
from tests.models import make_target

pytestmark = pytest.mark.full

FIXTURE = Path(__file__).resolve().parents[3].parent / "shared" / "fixtures" / "eagle_dynamic_tree"
LAYER = "layers.0."
STEPS = 4


def make_head(
    target: Target, head_class: type[Eagle1Head] = Eagle1Head, embedding_scale: float = 1.0, **options
) -> Eagle1Head:
    """A head whose every tensor matters: biases away from zero, the norm away from one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build(Eagle1Options(**options), target, None)
        for name, parameter in head.named_parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    head.__class__, head.embedding_scale = head_class, embedding_scale
    return head.eval()


class SlowEagle1:
    """EAGLE-1 around transformers' own decoder layer: no cache, all rows again for every draft token."""

    def __init__(self, tensors: dict[str, Tensor], config: LlamaConfig, target: Target, scale: float = 1.0) -> None:
        weights = {name.removeprefix(LAYER): value for name, value in tensors.items() if name.startswith(LAYER)}
        config = LlamaConfig(**{**config.to_dict(), "attention_bias": "self_attn.q_proj.bias" in weights})
        config._attn_implementation = "eager"
        self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)
        self.layer.input_layernorm = nn.Identity()
        if config.attention_bias:
            weights["self_attn.o_proj.bias"] = torch.zeros(config.hidden_size)
        self.layer.load_state_dict(weights)
        self.fc, self.fc_bias = tensors["fc.weight"], tensors.get("fc.bias", 0)
        self.embedding = scale * tensors.get("embed_tokens.weight", target.embedding)
        # The whole model's way from the final norm to logits, scale and all.
        self.project, self.scale = target.model.lm_head, 1 / getattr(target.config, "logits_scaling", 1.0)

    def row(self, root: int, ids: Tensor, states: Tensor, steps: int, *, detach: bool = True) -> list[Tensor]:
        """The features [H] of row t = `root` at every step, each reading the outputs of those before it and the text's tokens."""
        hidden, result = states[: root + 1], []
        for step in range(steps):
            rows = root + 1 + step
            mixed = torch.cat([self.embedding[ids[1 : rows + 1]], hidden], -1) @ self.fc.T + self.fc_bias
            mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
            turn = self.rotary(mixed[None], torch.arange(rows)[None])
            out = self.layer(mixed[None], attention_mask=mask, position_embeddings=turn)
            out = out[0] if isinstance(out, tuple) else out
            result.append(out[0, -1])
            hidden = torch.cat([hidden, out[0, -1:].detach() if detach else out[0, -1:]])
        return result

    @torch.no_grad()
    def draft(self, root: int, ids: Tensor, states: Tensor, steps: int) -> Tensor:
        """[K, V] logits of the drafts after root x_{t+1}."""
        return self.project(torch.stack(self.row(root, ids, states, steps))) * self.scale


def documents(batch: TrainBatch) -> list[tuple[int, int, Tensor, Tensor]]:
    """(row, first position, ids, states) of every document."""
    found = []
    for b, row in enumerate(batch.document):
        for number in row[row >= 0].unique().tolist():
            inside = row == number
            found.append((b, int(inside.nonzero()[0]), batch.ids[b][inside], batch.last[b][inside]))
    return found


@torch.no_grad()
def check_training(head: Eagle1Head, batch: TrainBatch, draft: Callable[[int, Tensor, Tensor, int], Tensor]) -> None:
    """Hold the training pass, row by row, against the logits [K, V] that `draft(root, ids, states, K)` gives."""
    L, steps = batch.ids.shape[1], head(batch, STEPS).steps
    for step in steps:
        assert step.rows.tolist() == supervised_rows(batch, step.offset).flatten().nonzero().flatten().tolist()
    found = {(s.offset, int(row)): logits for s in steps for row, logits in zip(s.rows, s.logits, strict=True)}
    compared = 0
    for b, start, ids, states in documents(batch):
        for root in range(len(ids) - 2):
            expected = draft(root, ids, states, min(STEPS, len(ids) - 2 - root))
            for offset, logits in enumerate(expected):
                if (offset, b * L + start + root) in found:
                    torch.testing.assert_close(found[offset, b * L + start + root], logits, atol=5e-5, rtol=5e-5)
                    compared += 1
    assert compared == len(found) > 50


def check_reference(head: Eagle1Head, target: Target) -> None:
    slow = SlowEagle1(head.state_dict(), head.config, target, head.embedding_scale)
    check_training(head, pack(target, documents_of(target), ()), slow.draft)


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {}, {}),
    "biases": ("llama", {}, {"fc_bias": True, "qkv_bias": True}),
    "head_dim": ("qwen3", {"head_dim": 32}, {"intermediate_size": 40}),
    "scaled logits": ("granite", {}, {}),
    "yarn": ("llama", {"rope_parameters": YARN}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_logits_are_those_of_the_slow_reference(case):
    kind, overrides, options = CASES[case]
    target = make_target(kind, **overrides)
    check_target(target)  # finds the scale of the logits
    check_reference(make_head(target, embedding_scale=4.0, **options), target)


def published_config(head: Eagle1Head, **changes: Any) -> dict[str, Any]:
    """The keys that EAGLE writes, as in its first heads; a change to None leaves a key out."""
    c = head.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        **{key: getattr(c, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")},
        **{key: getattr(c, key) for key in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")},
        "rope_theta": c.rope_parameters["rope_theta"],
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def publish(folder: Path, head: Eagle1Head, *, pickled: bool = False, drop: tuple[str, ...] = (), **more: Any) -> Path:
    """Write a folder as EAGLE publishes it. more: keys of config.json, and `tensors` to add."""
    folder.mkdir(exist_ok=True)
    tensors = {**head.state_dict(), **more.pop("tensors", {})}
    tensors = {name: value for name, value in tensors.items() if name not in drop}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(published_config(head, **more)))
    return folder


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("options", [{}, {"fc_bias": True, "qkv_bias": True}], ids=["plain", "biases"])
def test_a_published_folder_is_the_head(pickled, options, tmp_path):
    target = make_target(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    head = make_head(target, **options)
    again = load_head(publish(tmp_path / "head", head, pickled=pickled), target)
    assert isinstance(again, Eagle1Head)
    assert same_logits(head, again, target)
    assert again.options == head.options
    # What was read can be kept as a checkpoint of the project's own.
    save_head(again, tmp_path / "ours", target)
    assert "embed_tokens.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    assert same_logits(head, load_head(tmp_path / "ours", target), target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_fp32(dtype, tmp_path):
    target = make_target()
    head = make_head(target)
    rounded = {name: value.to(dtype) for name, value in head.state_dict().items()}
    again = load_head(publish(tmp_path / "head", head, pickled=True, tensors=rounded), target)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert torch.equal(again.fc.weight, rounded["fc.weight"].float())


@pytest.mark.parametrize("case", ["same", "none", "own"])
def test_the_embedding_is_the_targets_unless_the_head_has_its_own(case, tmp_path):
    target = make_target()
    head, before = make_head(target), target.embedding.clone()
    own = {"embed_tokens.weight": before + 1} if case == "own" else {}
    drop = ("embed_tokens.weight",) if case == "none" else ()
    again = load_head(publish(tmp_path / "head", head, tensors=own, drop=drop), target)
    assert (again.embed_tokens.weight.data_ptr() == target.embedding.data_ptr()) == (case != "own")
    assert torch.equal(again.embed_tokens.weight, before + (case == "own"))
    assert not again.embed_tokens.weight.requires_grad
    assert torch.equal(target.embedding, before)
    check_reference(again, target)


def test_a_projection_that_is_the_targets_is_left_out(tmp_path):
    target = make_target()
    head = make_head(target)
    folder = publish(tmp_path / "head", head, tensors={"lm_head.weight": target.head.weight.clone()})
    assert same_logits(head, load_head(folder, target), target)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": None}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
        ({"rope_theta": 500.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 500.0}),
        (
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        ),
    ],
)
def test_rotation_is_that_of_the_heads_own_configuration(keys, expected, tmp_path):
    target = make_target(rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    again = load_head(publish(tmp_path / "head", make_head(target), **keys), target)
    assert {key: again.config.rope_parameters[key] for key in expected} == expected
    check_reference(again, target)


WEIGHT = "layers.0.mlp.up_proj.weight"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other vocab": ({"vocab_size": 161}, "says vocab_size 161, but .* has 160: this is a draft for another target"),
    "other hidden": ({"hidden_size": 32}, "says hidden_size 32, but .* has 64: this is a draft for another target"),
    "no vocab": ({"vocab_size": None}, "says vocab_size None, but .* has 160"),
    "layers": ({"num_hidden_layers": 2}, "says num_hidden_layers 2, but an EAGLE head has one"),
    "heads": ({"num_attention_heads": 5}, "describes no Llama layer .*not a multiple"),
    "groups": ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4"),
    "type": ({"num_attention_heads": "four"}, "describes no Llama layer"),
    "zero": ({"num_attention_heads": 0}, "describes no Llama layer"),
    "activation": ({"hidden_act": "smooth"}, "describes no Llama layer .*smooth"),
    "rope": ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "describes no Llama layer .*spiral"),
    "width": ({"intermediate_size": 97}, r"has shape .*but its configuration says .*; fetch the head again"),
    "missing": ({"drop": (WEIGHT,)}, f"model.safetensors lacks the tensor {WEIGHT}.*; fetch the head again"),
    "no fc": ({"drop": ("fc.weight",)}, "no draft head that is known here: .* there is no tensor fc.weight"),
    "surplus": ({"tensors": {"norm.weight": torch.ones(64)}}, "unknown tensor norm.weight"),
    "fc bias": ({"bias": True}, "lacks the tensor fc.bias"),
    "no fc bias": ({"bias": False, "tensors": {"fc.bias": torch.ones(64)}}, "unknown tensor fc.bias"),
    "half a bias": ({"tensors": {"layers.0.self_attn.q_proj.bias": torch.ones(64)}}, "lacks the .*k_proj.bias"),
    "own projection": ({"tensors": {"lm_head.weight": torch.ones(160, 64)}}, "an lm_head.weight that is not the"),
    "small projection": ({"tensors": {"lm_head.weight": torch.ones(9, 64)}}, "an lm_head.weight that is not the"),
    "small embedding": ({"tensors": {"embed_tokens.weight": torch.ones(9, 64)}}, "embed_tokens.weight has shape"),
    "quantized": ({"tensors": {WEIGHT: torch.ones(96, 64, dtype=torch.int8)}}, "as torch.int8: .* not quantized"),
    "a list": ({"pickled": True, "tensors": {"fc.weight": [1.0]}}, "holds no names with tensors"),
    "medusa": ({"medusa_num_heads": 3}, r"holds no weights \(none of medusa_lm_head"),
    "eagle3": ({"architectures": ["LlamaForCausalLMEagle3"]}, "lacks the tensor layers.0.input_layernorm.weight"),
    "eagle3 vocab": ({"draft_vocab_size": 80}, "lacks the tensor d2t"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_loaded_is_one_sentence(case, tmp_path):
    target, (changes, words) = make_target(), REFUSED[case]
    folder = publish(tmp_path / "head", make_head(target), **changes)
    with pytest.raises(UserError, match=words) as caught:
        load_head(folder, target)
    assert "\n" not in str(caught.value)


def test_safetensors_are_read_before_a_pickle(tmp_path):
    target = make_target()
    head = make_head(target)
    publish(tmp_path / "head", head, pickled=True, tensors={"fc.weight": [1.0]})
    assert same_logits(head, load_head(publish(tmp_path / "head", head), target), target)


@pytest.mark.skipif(not FIXTURE.is_dir(), reason="the reference run (../shared/fixtures) is not here")
def test_the_head_of_eagles_own_run():
    """EAGLE's tree holds the head's best child of each root, and no child beyond its top_k."""
    target = load_target(str(FIXTURE / "target"))
    head = load_head(FIXTURE / "head", target)
    tensors = load_file(FIXTURE / "head" / "model.safetensors")
    slow = SlowEagle1(tensors, LlamaConfig(**json.loads((FIXTURE / "head" / "config.json").read_text())), target)
    rounds = hits = 0
    for setting in json.loads((FIXTURE / "expected.json").read_text())["settings"]:
        for run in setting["runs"]:
            ids, place = torch.tensor(run["prompt"] + run["output"]), 0
            batch = pack(target, [[ids]], ())
            batch.mask.fill_(True)
            step = head(batch, 1).steps[0]
            for accepted in run["accepted_per_round"]:
                row = len(run["prompt"]) + place - 1
                place += accepted + 1
                if place >= len(run["output"]):
                    break
                logits = step.logits[step.rows.tolist().index(row)]
                if rounds % 20 == 0:
                    torch.testing.assert_close(logits, slow.draft(row, ids, batch.last[0], 1)[0], atol=1e-4, rtol=1e-4)
                best = logits.topk(setting["top_k"]).indices.tolist()
                assert int(ids[row + 2]) in best if accepted else int(ids[row + 2]) != best[0]
                rounds, hits = rounds + 1, hits + (int(ids[row + 2]) == best[0])
    assert rounds > 300
    assert hits > 100
