"""Serve an export wrongly on purpose in a real engine, and hold `draftsmith verify` to saying what was done."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftsmith.cli.verifying import start_and_ask
from draftsmith.errors import UserError
from draftsmith.eval.parity.bundle import make_bundle
from draftsmith.eval.parity.diagnose import RIGHT, diagnose
from draftsmith.heads.formats.recognise import load_head
from draftsmith.stages.gguf import LAYOUT as LLAMA_CPP_LAYOUT
from scripts.bench.engines.compare import PRE_TOKENIZER, OurSide

HEAD = "eagle3 norm_before_residual, W=512"
"""The plan whose head is served wrongly: it has all that is spoiled here."""
_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Named:
    """What verify said of an engine that served `head` as `served` says."""

    head: str
    layout: str
    engine: str
    version: str
    served: str
    stage: str
    difference: str
    causes: tuple[str, ...]
    ties: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether the fault is named, and nothing where there is none."""
        return self.served in self.causes if self.stage else self.served == RIGHT


def _layers_too_high(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for place in (config, config["eagle_config"]):
        place[_LAYERS] = [layer + 1 for layer in place[_LAYERS]]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _other_map(ids: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        own = torch.arange(len(tensors["d2t"]))
        tensors["d2t"] = ids(tensors["d2t"] + own) - own
        save_file(tensors, file, {"format": "pt"})

    return spoil


_SPOIL: dict[str, Callable[[Path], None]] = {
    RIGHT: lambda folder: None,
    "layer + 1": _layers_too_high,
    "shifted vocabulary map": _other_map(lambda ids: ids.roll(-1)),
    "no vocabulary map": _other_map(lambda ids: torch.arange(len(ids))),
}
"""By the name of the fault, what is done to the files that the engine serves; the bundle stays that of the right ones."""


def serve_wrongly(side: OurSide, engine: str, home: Path, folder: Path) -> list[Named]:
    """Serve the head rightly and with every fault; return what verify says of each, by drafted tokens."""
    if side.candidate.name != HEAD:
        return []
    layout, target = {"vllm": "eagle3", "llama.cpp": LLAMA_CPP_LAYOUT}[engine], side.served.folder
    export = side.export(layout, folder / "verify")
    with side.lock:
        head = load_head(export, side.target).eval()
        bundle = make_bundle(side.target, head, side.requests, side.K, {}, layout)
    if bundle is None:
        raise UserError(f"no prompt of the recipe leaves room for a bundle of {export}: give shorter ones.")
    found = []
    for fault, spoil in _SPOIL.items():
        served = folder / "served-wrongly"
        shutil.rmtree(served, ignore_errors=True)
        shutil.copytree(export, served)
        spoil(served)
        answered = start_and_ask(served, bundle, engine, home, target, PRE_TOKENIZER)
        verdict = diagnose(bundle, answered.seen, answered.end_ids)
        version = answered.engine.rsplit(" ", 1)[-1]
        said = verdict.stage, verdict.difference, verdict.causes, verdict.ties
        found.append(Named(side.candidate.name, layout, engine, version, fault, *said))
    return found
