"""A feature store of ours as speculators reads its data sets.

Imported by that package's own Python beside `speculators_eagle3.py`, so it needs torch and safetensors alone. The store has the
state y behind the target's final norm (weight w), speculators wants the one before: the norm of y / w, times w, is y again.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class Store:
    """Samples of a feature store as speculators' data sets give them; `norm` is the weight [H] of the final norm."""

    def __init__(self, path: str, layer_ids: list[int], norm: Tensor) -> None:
        self.path, self.layer_ids = Path(path), list(layer_ids)
        if bool((norm.abs() < 1e-6).any()):
            raise SystemExit("The target's final norm has a weight of zero: the state before it cannot be told.")
        self.norm = norm.float()
        index = json.loads((self.path / "index.json").read_text(encoding="utf-8"))
        if not index["complete"] or not set(layer_ids) <= set(index["layer_ids"]):
            raise SystemExit(f"{path} is not complete or lacks one of the layers {layer_ids}.")
        self.place: dict[str, tuple[int, int]] = {}
        self.length: dict[str, int] = {}
        self.shards: list[Any] = []
        for number, shard in enumerate(index["shards"]):
            self.shards.append(safe_open(self.path / shard["file"], framework="pt"))
            for row, (name, length) in enumerate(zip(shard["ids"], shard["lengths"], strict=True)):
                self.place[name], self.length[name] = (number, row), length

    def get(self, name: str) -> dict[str, Tensor]:
        """One sample of L tokens: input_ids [L], loss_mask [L], hidden_states [L, A*H], verifier_last_hidden_states [L, H]
        (before the final norm, up to its scale), lengths [1], position_ids [L]."""
        number, row = self.place[name]
        shard = self.shards[number]
        start, end = (int(x) for x in shard.get_slice("offsets")[row : row + 2])
        last = shard.get_slice("last")[start:end].float()
        return {
            "hidden_states": torch.cat([shard.get_slice(f"aux.{k}")[start:end] for k in self.layer_ids], -1),
            "input_ids": shard.get_slice("ids")[start:end].long(),
            "verifier_last_hidden_states": last / self.norm,
            "loss_mask": shard.get_slice("mask")[start:end].bool(),
            "lengths": torch.tensor([end - start]),
            "position_ids": torch.arange(end - start),
        }


def final_norm(target: str) -> Tensor:
    """The weight [H] of the final norm of a target in safetensors files."""
    for file in sorted(Path(target).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("model.norm.weight"):
                    return opened.get_tensor(name)
    raise SystemExit(f"There is no model.norm.weight in {target}.")
