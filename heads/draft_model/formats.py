"""Draft models as a directory that transformers and the engines load like any Llama: schema, and reading."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.draft_model import DraftLmOptions
from draftsmith.heads.draft_model.head import (
    EMBEDDING,
    PROJECTION,
    DraftLmHead,
    check_tokens,
    check_vocabulary,
    drop_tied,
    read_llama,
)
from draftsmith.heads.files import INDEX, PICKLED, WEIGHTS, explain_config, read_config, read_weights
from draftsmith.heads.formats import engines
from draftsmith.heads.formats.layout import Layout, Served
from draftsmith.heads.formats.llama_cpp import LLAMA_CPP_SILENT, start_llama_cpp
from draftsmith.heads.formats.published import is_the_same
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.formats.schema import LLAMA_KEYS, Export, Schema, TensorRow, llama_layer
from draftsmith.target.folder import TOKENIZER_FILES
from draftsmith.target.target import Target

REMEDY = "fetch it again, or export it again"


class ModelSchema(Schema):
    """A whole model, with the target's tokenizer and what its generation ends on."""

    def copies(self, export: Export) -> dict[str, Path]:
        folder = export.target.directory
        files = [] if folder is None else [folder / name for name in TOKENIZER_FILES]
        return {file.name: file for file in files if file.is_file()}


def _end(name: str) -> Callable[[Export], Any]:
    return lambda export: getattr(export.target.config, name, None)


DRAFT_MODEL = ModelSchema(
    name="draft_model",
    tensors=(
        TensorRow(EMBEDDING),
        *llama_layer("model.layers.{m}."),
        TensorRow("model.norm.weight"),
        TensorRow(PROJECTION, when=lambda config: not config["tie_word_embeddings"]),
    ),
    keys={
        "architectures": ["LlamaForCausalLM"],
        **LLAMA_KEYS,
        **{name: attrgetter(f"head.config.{name}") for name in ("num_hidden_layers", "tie_word_embeddings")},
        # Left out, a Llama's would be 1 and 2.
        **{name: _end(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    },
)


def load_draft_model_directory(path: Path | str, target: Target) -> DraftLmHead:
    """Return the draft model in a directory of a plain Llama, fp32, on the target's device.

    Raises UserError for the target itself, other tokens than the target's, layers that a plain Llama has not, and weights
    that are missing, damaged, quantized, misshapen or in need of code.
    """
    path = Path(path)
    if target.directory is not None and path.resolve() == target.directory.resolve():
        raise UserError(
            f"{path} is the target itself, which drafts nothing for itself: give a smaller model, or a head."
        )
    described = read_config(path)
    with explain_config(path, "Llama", REMEDY):
        config = read_llama(LlamaConfig.from_dict(described), f"The model {path}", "give another draft model")
    check_vocabulary(f"The model {path}", config.vocab_size, target)
    check_tokens(str(path), path, target)
    file, stored = read_weights(path, target.device, (WEIGHTS, INDEX, PICKLED))
    with torch.device(target.device), explain_config(path, "Llama", REMEDY):
        head = DraftLmHead(DraftLmOptions(), config)
    fill(head, _plain(config, stored, file), file, remedy=REMEDY)
    return head


def _plain(config: LlamaConfig, tensors: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return the tensors that are a plain Llama's, less an output projection that is the embeddings."""
    # Tables of older files, which follow from the configuration.
    kept = {name: value for name, value in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_word_embeddings and {PROJECTION, EMBEDDING} <= kept.keys():
        if not is_the_same(kept[PROJECTION], kept[EMBEDDING]):
            raise UserError(
                f"{file} holds an {PROJECTION} that is not the embeddings, though tie_word_embeddings is true: {REMEDY}."
            )
        return drop_tied(config, kept)
    return kept


_VLLM = Served(
    engines.start_vllm("draft_model"),
    caveats=(
        engines.path_decides("draft_model"),
        'vLLM drafts greedily at every temperature; `"draft_sample_method": "probabilistic"` beside the method draws '
        "drafts from the model's distribution.",
    ),
    reserved=engines.RESERVED_PATH_WORDS,
)
_SCHEDULE = (
    "One prompt at a time. It changes the number of drafted tokens as it goes, unless "
    "`num_assistant_tokens_schedule` is `constant`."
)
_ENGINES = {
    "vllm": _VLLM,
    "sglang": Served(
        engines.start_sglang("STANDALONE"), caveats=(f"The algorithm is STANDALONE. {engines.SGLANG_ROOT}",)
    ),
    "tensorrt_llm": Served(engines.start_tensorrt_llm("DraftTarget")),
    "llama_cpp": Served(start_llama_cpp("draft-simple", whole=True), caveats=(LLAMA_CPP_SILENT,)),
    "transformers": Served(engines.start_transformers, caveats=(_SCHEDULE,)),
}
LAYOUTS = (Layout("draft_model", DRAFT_MODEL, load_draft_model_directory, _ENGINES),)


def _is_llama(folder: HeadFolder) -> bool:
    """A whole plain Llama; what it drafts for, its loader asks."""
    known = folder.config.get("architectures") == ["LlamaForCausalLM"]
    return known and {"norm.weight", "embed_tokens.weight"} <= folder.names


FORMATS = (Format("a draft model", 21, _is_llama, load_draft_model_directory),)
