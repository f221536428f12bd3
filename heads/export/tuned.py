"""Exporting a target that was tuned with its heads: as a whole model, or as the adapter alone.

Shapes: r rank of the adapter, L tokens.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from safetensors.torch import load_file

import draftsmith
from draftsmith.heads.checkpoint import CONFIG, model_directory
from draftsmith.heads.export.export import agree
from draftsmith.heads.export.readme import README
from draftsmith.heads.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from draftsmith.heads.formats.schema import ModelFiles, Schema, TensorRow, target_reference
from draftsmith.heads.record import RECORD, TUNED, Passport, write_passport
from draftsmith.storage import write_json
from draftsmith.target.folder import weight_files
from draftsmith.target.identity import TargetIdentity, identify_directory
from draftsmith.target.pretrained import open_model
from draftsmith.target.target import Target
from draftsmith.target.tuned import TunedTarget, view_of

FOLDERS = {"merge": "target", "keep": "adapter"}
"""The folder of the target's export, next to that of the heads."""
_READ = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
"""What engines take for granted of an adapter: they apply no biases, and no tensors but LoRA's."""
# What a folder of a model holds besides weights and configuration: tokenizer, chat template, generation, code.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
_NOT_COPIED = (CONFIG, README, RECORD, ADAPTER_CONFIG)


def replaceable(dest: Path) -> tuple[str, ...]:
    """Return the names of the files that an export to `dest` may replace: those that an earlier export wrote."""
    if not (dest / RECORD).is_file():
        return ()
    return tuple(file.name for kind in (*_COMPANIONS, "*.safetensors", README) for file in dest.glob(kind))


def write_merged(
    method: str, original: Target, tuned: Target, dest: Path, trust_remote_code: bool = False
) -> TargetIdentity:
    """Write the tuned target as a model of its own, with the original's tokenizer and other files; return its identity.

    It is loaded again and must give the same logits. trust_remote_code: as for the original.
    """
    with model_directory(dest, replaceable(dest)) as folder:
        if original.directory is not None:
            weights = {file.name for file in weight_files(original.directory)}
            for pattern in _COMPANIONS:
                for file in original.directory.glob(pattern):
                    if file.name not in (*_NOT_COPIED, *weights) and not file.name.endswith(".index.json"):
                        shutil.copyfile(file, folder / file.name)
        tuned.model.save_pretrained(folder)
        identity = identify_directory(folder, str(dest))
        write_passport(folder, Passport(draftsmith.__version__, method, TUNED, original.identity.to_json()))
        (folder / README).write_text(_merged_readme(method, original), encoding="utf-8")
        again, *_ = open_model(
            str(folder),
            dtype=tuned.dtype_name,
            device=tuned.device,
            attn_implementation=tuned.config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        assert _same_logits(tuned.model, again), "the merged target gives other logits"
    return identity


def write_adapter(method: str, tuned: TunedTarget, dest: Path) -> TargetIdentity:
    """Write the adapter in float32 as peft and engines read it; return the identity of the target with the adapter.

    It is loaded again, onto the original, and must give the same logits.
    """
    from peft import PeftModel

    original, spec = tuned.target, tuned.spec
    with model_directory(dest, replaceable(dest)) as folder:
        tuned.model.save_pretrained(folder, save_embedding_layers=False)
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config |= {"base_model_name_or_path": target_reference(original), "lora_alpha": float(spec.alpha)}
        config["target_modules"] = sorted(config["target_modules"])
        write_json(folder / ADAPTER_CONFIG, config)
        lora = (name for name, _ in tuned.model.get_base_model().named_parameters() if ".lora_" in name)
        rows = tuple(TensorRow(f"base_model.model.{name.replace('.default.', '.')}") for name in lora)
        Schema("adapter", rows, {}).check(ModelFiles(config, load_file(folder / ADAPTER_WEIGHTS), torch.float32))
        assert {key: config[key] for key in _READ} == _READ, "the adapter has more than engines read"
        write_passport(folder, Passport(draftsmith.__version__, method, "adapter", original.identity.to_json()))
        (folder / README).write_text(_adapter_readme(method, tuned), encoding="utf-8")
        with catch_warnings():
            simplefilter("ignore", FutureWarning)  # of peft about transformers
            again = PeftModel.from_pretrained(view_of(original.model), str(folder))
        assert _same_logits(tuned.model, again), "the adapter gives other logits"
    # The tuned weights are stored nowhere, so they have no hash of their own: the fingerprint identifies them.
    return replace(
        original.identity,
        path=f"{target_reference(original)} with the adapter {dest}",
        fingerprint=tuned.fingerprint,
        weights=None,
        lm_head=None if spec.lm_head else original.identity.lm_head,
    )


@torch.no_grad()
def _same_logits(one: Any, other: Any) -> bool:
    """Return whether two models give the same logits on random tokens [1, L]."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = one.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocab_size, (1, 16), generator=generator).to(one.get_input_embeddings().weight.device)
    # Each module's own mode: the wrapped target is never in training.
    were = {module: module.training for module in one.modules()}
    logits = [model.eval()(input_ids=ids, use_cache=False).logits for model in (one, other)]
    for module, training in were.items():
        module.training = training
    return agree(*logits)


def _merged_readme(method: str, original: Target) -> str:
    return f"""# The target of {method} heads

`{target_reference(original)}` (fingerprint {original.fingerprint}), tuned together with the heads in the folder next
to this one; the adapter is merged into its weights. Serve this model where you would serve the original: its texts differ from
the original's. The report of the evaluation says by how much.
"""


def _adapter_readme(method: str, tuned: TunedTarget) -> str:
    original = target_reference(tuned.target)
    return f"""# The adapter of {method} heads

A LoRA adapter for `{original}` (fingerprint {tuned.target.fingerprint}), trained together with the heads in the folder
next to this one. The heads draft for the target with this adapter, not for the original alone. Texts of the tuned target
differ from those of the original; the report of the evaluation says by how much.

The README of the heads starts vLLM on all three. For an engine that drafts for no target with an adapter, export with
`export.adapter: merge`.
"""
