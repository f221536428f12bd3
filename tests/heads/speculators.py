"""A training step of a block drafter as speculators 0.9.0 computed it: its weights and data, and its results to hold ours against.

Its blocks begin at every token of the mask, and a slot counts where its own token does: so a block's rows are named here. It divides
by the number of slots.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftsmith.data.batch import TrainBatch
from draftsmith.decoder.sampling import Sampling
from draftsmith.heads.layers.from_target import LAYER_KEYS
from draftsmith.heads.plan import plan_queries
from draftsmith.target.target import Target, TargetHead

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@dataclass(frozen=True)
class Reference:
    """A folder of files: see its tests."""

    folder: Path

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{name}.safetensors")

    def facts(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return found

    @cached_property
    def expected(self) -> dict[str, Any]:
        return self.facts("expected")

    @cached_property
    def size(self) -> int:
        """Slots of a block."""
        return int(self.facts("draft_config")["block_size"])

    @cached_property
    def target_head(self) -> TargetHead:
        return TargetHead(self.tensors("target_head")["lm_head.weight"])

    @cached_property
    def batch(self) -> TrainBatch:
        data, norm = self.tensors("batch"), LlamaRMSNorm(1, eps=1e-6)
        norm.weight.data = self.tensors("target_head")["model.norm.weight"]
        last = norm(data["last"]).detach()
        logits = self.target_head.logits(last)
        return TrainBatch(
            ids=data["ids"],
            mask=data["mask"].bool(),
            document=data["doc"],
            position=data["pos"],
            aux=data["aux"],
            last=last,
            top1=logits.argmax(-1),
            logsumexp=logits.logsumexp(-1),
        )

    @cached_property
    def anchors(self) -> Tensor:
        return self.batch.mask[0, : -self.size].nonzero()[:, 0]

    @cached_property
    def counted(self) -> list[Tensor]:
        """For each step, which blocks have a token to learn there: slot k predicts the token k behind the anchor."""
        return [self.batch.mask[0, self.anchors + k] for k in range(1, self.size)]

    @property
    def slots(self) -> int:
        return sum(int(own.sum()) for own in self.counted)

    def head(self, kind: type[Any], options: type[Any], known: dict[str, Any], renamed: dict[str, str]) -> Any:
        """Their head in ours. known: further options. renamed: beginnings of names of theirs -> what they are in ours."""
        config, weights = self.facts("draft_config"), self.named(self.tensors("draft"), renamed)
        section, layer_ids = config["transformer_layer_config"], config["aux_hidden_state_layer_ids"]
        same = {key: config[key] for key in ("block_size", "mask_token_id")}
        made = options(layer_ids=layer_ids, num_layers=section["num_hidden_layers"], **same, **known)
        target = cast(Target, SimpleNamespace(embedding=weights["embed_tokens.weight"], head=self.target_head))
        head = kind(made, LlamaConfig(**{key: section[key] for key in LAYER_KEYS}), target, layer_ids, None)
        head.load_state_dict({name: value for name, value in weights.items() if name in head.state_dict()})
        return head

    def named(self, tensors: dict[str, Tensor], renamed: dict[str, str]) -> dict[str, Tensor]:
        found = {}
        for name, value in tensors.items():
            old = next((old for old in renamed if name.startswith(old)), "")
            found[renamed.get(old, "") + name.removeprefix(old)] = value
        return found

    def blocks(self, head: Any) -> Tensor:
        """The states of the anchors' blocks [R, S, H] before the final norm."""
        batch = self.batch
        return cast(
            Tensor, head._fill(batch, plan_queries(batch, self.anchors - 1), head._context_keys(batch), self.size)
        )

    def check(self, loss: Tensor, head: torch.nn.Module, renamed: dict[str, str]) -> None:
        """Hold the loss and its gradients against theirs."""
        assert loss.item() == pytest.approx(self.expected["loss"], rel=1e-6)
        loss.backward()
        theirs = self.named(self.tensors("grads"), renamed)
        ours = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
        assert ours.keys() == theirs.keys()
        apart = {name: float((ours[name] - grad).norm() / grad.norm()) for name, grad in theirs.items()}
        assert max(apart.values()) <= 1e-5, apart

    def first(self) -> tuple[Any, int]:
        """A round's state at the first anchors, of which their drafts are known, and how many these are."""
        first = torch.tensor(self.expected["anchors"])
        assert torch.equal(self.anchors[: len(first)], first)
        root, limit = self.batch.ids[0, first], torch.full_like(first, self.size)
        return SimpleNamespace(root_B=root, limit_B=limit, sampling=Sampling(0.0)), len(first)
