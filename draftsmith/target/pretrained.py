"""Opening a model with transformers; whatever is wrong with it is a UserError of one sentence."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from draftsmith.errors import UserError, first_line, why_not
from draftsmith.foreign.code import foreign_code
from draftsmith.foreign.hub import why_offline
from draftsmith.target.config import (
    attention_of,
    check_causal,
    check_layer_types,
    check_quantization,
    check_weights,
    how_to_read,
    read_model_config,
)
from draftsmith.target.folder import TOKENIZER_FILES, read_directory, read_eos_ids, weight_files
from draftsmith.target.gguf_file import is_gguf, model_folder, open_gguf
from draftsmith.target.kernels import GROUPED
from draftsmith.target.taken import check_taken

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class OpenedModel:
    """A loaded model, the folder its files came from, and a sentence about modules in them that it leaves, "" for none."""

    model: Any
    directory: Path
    beside: str


def open_model(
    path: str, *, dtype: str, device: str | torch.device, attn_implementation: str, trust_remote_code: bool
) -> OpenedModel:
    """Load a causal language model from a local folder, a Hub name or a GGUF file; never pickled weights.

    Raises UserError for: a missing path, a folder that is no model, an encoder-only or encoder-decoder model, a type
    transformers does not know, layers that keep a state, missing, pickled or damaged weights, weights that the model does not
    take, an unknown dtype, a missing device.
    """
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {str(device)!r} is not available here ({first_line(error)}): use cpu.") from error
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} for the target {path}: choose auto or one of {', '.join(DTYPES)}.")
    source = str(model_folder(path))
    _check_path(source)
    if Path(source).is_dir() and not trust_remote_code:
        read_model_config(Path(source), "the target")
    config = load_config(source, trust_remote_code)
    check_causal(path, config, trust_remote_code)
    directory = weights_directory(source)
    spans = read_directory(directory)
    read_eos_ids(directory)  # transformers takes whatever stands there
    if not trust_remote_code:  # whose sizes may be called anything
        check_weights(config, spans, directory / "config.json")
    quantized, attention = check_quantization(path, config), attention_of(config, attn_implementation)
    with foreign_code(f"Cannot load the target {path}", how_to_read(quantized)):
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # told by `check_taken`, by name
            output_loading_info=True,
        )
    beside = check_taken(path, model, info, spans, quantized)
    check_layer_types(path, model.config, type(model))  # of code that came with it, too
    if where.type == "cpu" and attention == "sdpa":
        model.set_attn_implementation(GROUPED)
    return OpenedModel(model.to(where), directory, beside)


def _check_path(path: str) -> None:
    """Raise UserError for a local path that is no folder with a model."""
    folder = Path(path)
    try:
        folder.lstat()
    except (ValueError, OSError) as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise UserError(f"The target {path!r} cannot be read ({why_not(error)}): give another path.") from error
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if not folder.exists():
        if looks_local:
            raise UserError(f"The target {path} does not exist: give a folder with a model or a Hub name owner/model.")
        return
    if not os.path.lexists(folder / "config.json"):
        raise UserError(f"The target {path} has no config.json: give the folder that holds the model's files.")


def load_config(path: str, trust_remote_code: bool = False, what: str = "the target") -> Any:
    """Return the config of a local folder, a Hub name or a GGUF file. Raises UserError, which calls it `what`, where there is none."""
    if is_gguf(path):
        return open_gguf(path).read_config()
    remedy = (
        "check its path" if Path(path).exists() else "check its path, or for a Hub name its spelling and the network"
    )
    if not Path(path).exists():
        why_offline()
    remote = "; it may need --target.trust_remote_code true, which runs code from its repository"
    with foreign_code(f"The config of {what} {path} cannot be read", remedy, {"trust_remote_code": remote}):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def weights_directory(path: str) -> Path:
    """Return the folder that holds the target's safetensors and tokenizer (fetched from the Hub, or made of a GGUF file, if need
    be)."""
    folder = model_folder(path)
    if not folder.is_dir():
        why = why_offline()
        with foreign_code(f"Cannot fetch the weights of the target {path}", "check its name and the network"):
            for name in ("model.safetensors", "model.safetensors.index.json"):
                if weights := cached_file(path, name, _raise_exceptions_for_missing_entries=False):
                    # Code that reads the folder later (identity, mask tokens) must find the same files every time.
                    for other in TOKENIZER_FILES:
                        cached_file(
                            path,
                            other,
                            _raise_exceptions_for_missing_entries=False,
                            _raise_exceptions_for_connection_errors=False,
                        )
                    return Path(weights).parent
        if why is not None:
            raise UserError(
                f"The weights of the target {path} are not in this machine's cache, and the Hub does not answer ({why}): mend the "
                "network, or fetch them first."
            )
        raise UserError(f"The target {path} has no safetensors weights on the Hub: choose one that does.")
    files = weight_files(folder)
    if not files:
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        raise UserError(
            f"The target {path} holds only pickled weights ({pickled[0]}), which can run code when opened: "
            "save it as safetensors (model.save_pretrained) first."
            if pickled
            else f"The target {path} has no weights (model.safetensors): fetch the whole model."
        )
    return folder
