"""MTP: a training step is that of speculators, and training on keys of its own step is the layer on each document alone."""

import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.layers.from_target import LAYER_KEYS
from draftsmith.heads.mtp.head import MtpHead, MtpOptions, build
from draftsmith.target.target import Target, TargetHead
from tests.batches import documents_of, pack
from tests.models import make_target
from tests.natives import OWN_LAYERS

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "speculators_mtp"
THEIRS = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "fc",
    "final_layernorm": "norm",
}
"""Parts of speculators' layer that ours does not hold within its own."""


def ours(name: str) -> str:
    """Return our name of a tensor of speculators' layer."""
    name = name.removeprefix("mtp_layers.0.")
    first = name.split(".")[0]
    return name.replace(first, THEIRS[first]) if first in THEIRS else f"layers.0.{name}"


def test_loss_and_gradients_are_those_of_speculators() -> None:
    config, expected = (json.loads((FIXTURE / f"{name}.json").read_text()) for name in ("draft_config", "expected"))
    data, weights, gradients = (load_file(FIXTURE / f"{name}.safetensors") for name in ("batch", "draft", "grads"))
    section = config["transformer_layer_config"]
    target_head = TargetHead(weights["lm_head.weight"])
    target = cast(Target, SimpleNamespace(embedding=weights["embed_tokens.weight"], head=target_head))
    options = MtpOptions(mtp_steps=3, step_keys=True, qk_norm=True)
    head = MtpHead(options, LlamaConfig(**{key: section[key] for key in LAYER_KEYS}), target)
    stored = {ours(name): value for name, value in weights.items() if name.startswith("mtp_layers")}
    assert head.load_state_dict(stored, strict=False).missing_keys == ["embed_tokens.weight"]
    ids, counted = data["ids"], data["mask"].bool()
    logits = target_head.logits(data["last"])
    batch = TrainBatch(
        ids=ids,
        mask=torch.ones_like(counted),  # its rows count where their label does alone: chosen below
        document=data["doc"],
        position=data["pos"],
        aux=data["aux"],
        last=data["last"],  # as that trainer feeds it
        top1=logits.argmax(-1),
        logsumexp=logits.logsumexp(-1),
    )
    length, losses = ids.shape[1] - 3 - 1, []  # one for all steps
    for step, weight in zip(head(batch, 3).steps, expected["step_weights"], strict=True):
        label = step.rows + 2 + step.offset
        own = (step.rows < length) & counted[0, label]
        losses.append(weight * F.cross_entropy(step.logits[own], ids[0, label[own]]))
    assert [x.item() for x in losses] == pytest.approx(
        [expected["metrics"][f"loss_step_{k}"] for k in range(3)], rel=1e-6
    )
    loss = torch.stack(losses).sum()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    loss.backward()
    found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    assert found.keys() == {ours(name) for name in gradients}
    apart = {name: float((found[ours(name)] - grad).norm() / grad.norm()) for name, grad in gradients.items()}
    assert max(apart.values()) <= 1e-5, apart


class SlowMtp:
    """MTP around transformers' own decoder layer: no cache, all rows of a document again for every entry."""

    def __init__(self, head: MtpHead, target: Target) -> None:
        self.head, self.target = head, target
        state = head.options.target_state
        self.before, self.vllm = state == "before_norm", state == "vllm"
        if head.options.layer == "target":
            config, like, self.rotary = deepcopy(target.config), target.decoder.layers[-1], target.decoder.rotary_emb
            config._attn_implementation = "eager"
            self.layer = type(like)(config, target.num_layers - 1)
        else:
            config = Qwen3Config(**{key: getattr(head.config, key) for key in LAYER_KEYS})
            config._attn_implementation = "eager"
            self.layer, self.rotary = Qwen3DecoderLayer(config, 0), Qwen3RotaryEmbedding(config)
        self.layer.load_state_dict(head.layers[0].state_dict())

    def outputs(self, tokens: Tensor, hidden: Tensor, first: int = 0) -> Tensor:
        """Entries' tokens [n] and hidden states [n, H], from position `first` on -> outputs [n, H], causal."""
        head, n = self.head, len(tokens)
        embedded = self.target.embedding[tokens]
        if self.vllm and first == 0:
            embedded[0] = 0  # a copy
        read = [head.enorm(embedded), head.hnorm(hidden)]
        z_1nH = head.fc(torch.cat(read, -1))[None]
        rotation = self.rotary(z_1nH, torch.arange(first, first + n)[None])
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        return self.layer(z_1nH, attention_mask=mask, position_embeddings=rotation)[0]

    def states(self, ids: Tensor) -> Tensor:
        """The target's states [n, H] of the first tokens of a document, before its final norm or behind it."""
        seen: list[Tensor] = []
        hook = self.target.decoder.get_submodule("norm").register_forward_hook(
            lambda module, args, out: seen.append(args[0] if self.before else out)
        )
        self.target.forward(ids[None])
        hook.remove()
        return seen[0][0]

    def fed(self, out: Tensor) -> Tensor:
        raw = self.before or (self.vllm and self.target.model_type == "glm4_moe")
        return out if raw else self.head.norm(out)

    def logits(self, ids: Tensor, row: int, step: int) -> Tensor:
        """The logits [V] of a row of a document: by the keys of step 0 up to it, and its own later ones."""
        tokens, hidden = ids[1 : row + 2], self.states(ids)[: row + 1]
        for _ in range(step):
            hidden = torch.cat([hidden, self.fed(self.outputs(tokens, hidden)[-1:])])
            tokens = ids[1 : len(tokens) + 2]
        return self.target.head.logits(self.head.norm(self.outputs(tokens, hidden)[-1]))

    def logits_by_step(self, ids: Tensor, row: int, step: int) -> Tensor:
        """The same by the keys that rows up to it have in the same step."""
        hidden = self.states(ids)[: row + 1]
        for k in range(step + 1):
            out = self.outputs(ids[1 + k : row + 2 + k], hidden, k)
            hidden = self.fed(out)
        return self.target.head.logits(self.head.norm(out[-1]))


def perturbed(head: MtpHead) -> MtpHead:
    """Return the head with norms that are not all alike, and a routing bias that decides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in head.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        for name, buffer in head.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
    return head


@pytest.mark.parametrize(
    ("case", "step_keys", "state"),
    [
        *((None, step_keys, state) for step_keys in (False, True) for state in ("after_norm", "before_norm")),
        *((case, False, "after_norm") for case in OWN_LAYERS),
        ("deepseek", True, "before_norm"),
        *((case, False, "vllm") for case in OWN_LAYERS),
        (None, True, "vllm"),
    ],
)
def test_training_logits_are_those_of_the_slow_reference(
    case: str | None, step_keys: bool, state: Literal["after_norm", "before_norm", "vllm"]
) -> None:
    kind, keys = ("qwen3", {}) if case is None else OWN_LAYERS[case]
    target = make_target(kind, num_hidden_layers=2, **keys)
    own: dict[str, Any] = {"qk_norm": True} if case is None else {"layer": "target"}
    head = perturbed(build(MtpOptions(step_keys=step_keys, target_state=state, **own), target, None))
    rows = documents_of(target)
    batch = pack(target, rows, ())
    slow = SlowMtp(head, target)
    reference = slow.logits_by_step if step_keys else slow.logits
    width, checked = batch.ids.shape[1], 0
    starts = {(b, sum(map(len, row[:d]))): ids for b, row in enumerate(rows) for d, ids in enumerate(row)}
    with torch.no_grad():
        for step in head(batch, 3).steps:
            for flat, found in list(zip(step.rows.tolist(), step.logits, strict=True))[::3]:
                b, at = divmod(flat, width)
                (begin, ids) = max((place, ids) for (line, place), ids in starts.items() if line == b and place <= at)
                torch.testing.assert_close(found, reference(ids, at - begin, step.offset), rtol=1e-4, atol=1e-4)
                checked += 1
    assert checked > 20


def test_step_keys_are_for_training_alone() -> None:
    """Measuring and simulating take the keys of decoding whatever the training took."""
    target = make_target(num_hidden_layers=2)
    heads = [build(MtpOptions(step_keys=step_keys), target, None) for step_keys in (False, True)]
    heads[1].load_state_dict(heads[0].state_dict())
    batch = pack(target, documents_of(target), ())
    of_training, of_decoding = (
        [head.train(mode)(batch, 2).steps[1].logits for head in heads] for mode in (True, False)
    )
    assert torch.equal(*of_decoding)
    assert not torch.allclose(*of_training)


def test_keys_of_a_single_step_are_refused() -> None:
    with pytest.raises(UserError, match=r"head.step_keys is True: head.mtp_steps is 1, .* leave it out"):
        MtpOptions(mtp_steps=1, step_keys=True)
