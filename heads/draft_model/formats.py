"""Draft models as a directory that transformers and the engines load like any Llama: contract, and the way there and back.

Symbols in shapes: V target vocab, H draft hidden, I feed-forward width, N query heads, G key/value heads, D head size.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import fill
from draftsmith.heads.draft_model.head import DraftLmHead
from draftsmith.heads.draft_model.options import DraftLmOptions
from draftsmith.heads.draft_model.start import (
    EMBEDDING,
    PROJECTION,
    check_tokens,
    check_vocabulary,
    describe_config,
    drop_tied,
    read_llama,
)
from draftsmith.heads.files import INDEX, PICKLED, WEIGHTS, explain_config, read_config, read_weights
from draftsmith.heads.formats.contracts import (
    LLAMA_KEYS,
    Config,
    Contract,
    ExportRequest,
    KeyRule,
    ModelFiles,
    TensorRule,
    check_torch_dtype,
)
from draftsmith.heads.formats.engine_rules import LLAMA_CPP_SILENT, SGLANG_ROOT
from draftsmith.heads.formats.layout import Layout, Served
from draftsmith.heads.formats.published import is_the_same, layer_keys
from draftsmith.heads.formats.recognise import Format, HeadFolder
from draftsmith.heads.formats.start import (
    start_llama_cpp_draft_model,
    start_sglang,
    start_tensorrt_llm_draft_model,
    start_transformers,
    start_vllm,
)
from draftsmith.heads.target.files import TOKENIZER_FILES
from draftsmith.heads.target.target import Target

REMEDY = "fetch it again, or export it again"
_LAYER = "model.layers.{i}."
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _sizes(config: Config) -> dict[str, int]:
    names = {
        "V": "vocab_size",
        "H": "hidden_size",
        "I": "intermediate_size",
        "N": "num_attention_heads",
        "G": "num_key_value_heads",
        "D": "head_dim",
        "layers": "num_hidden_layers",
    }
    return {symbol: config[name] for symbol, name in names.items()}


DRAFT_MODEL = Contract(
    name="draft_model",
    tensors=(
        TensorRule(EMBEDDING, ("V", "H")),
        TensorRule(f"{_LAYER}input_layernorm.weight", ("H",)),
        TensorRule(f"{_LAYER}self_attn.q_proj.weight", ("N*D", "H")),
        TensorRule(f"{_LAYER}self_attn.k_proj.weight", ("G*D", "H")),
        TensorRule(f"{_LAYER}self_attn.v_proj.weight", ("G*D", "H")),
        TensorRule(f"{_LAYER}self_attn.o_proj.weight", ("H", "N*D")),
        TensorRule(f"{_LAYER}post_attention_layernorm.weight", ("H",)),
        TensorRule(f"{_LAYER}mlp.gate_proj.weight", ("I", "H")),
        TensorRule(f"{_LAYER}mlp.up_proj.weight", ("I", "H")),
        TensorRule(f"{_LAYER}mlp.down_proj.weight", ("H", "I")),
        TensorRule("model.norm.weight", ("H",)),
        TensorRule(PROJECTION, ("V", "H"), when=lambda config: not config["tie_word_embeddings"]),
    ),
    keys=(
        KeyRule("architectures", list, "the class that every reader loads", ["LlamaForCausalLM"]),
        *(rule for rule in LLAMA_KEYS if rule.name != "num_hidden_layers"),
        KeyRule("num_hidden_layers", int, "the layers; missing ones would be random"),
        KeyRule("attention_bias", bool, "readers would look for biases", False),
        KeyRule("mlp_bias", bool, "readers would look for biases", False),
        KeyRule("tie_word_embeddings", bool, "without it readers look for a projection, or pass it over"),
        KeyRule("torch_dtype", str, "the dtype of every tensor"),
    ),
    sizes=_sizes,
    ranges={"i": "layers"},
    forbidden={"quantization_config": "the weights are plain"},
    checks=(check_torch_dtype,),
)


def to_draft_model(head: DraftLmHead, target: Target, request: ExportRequest) -> ModelFiles:
    """Convert to a whole model, with the target's tokenizer and what its generation ends on."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        **layer_keys(head.config, request.dtype),
        **describe_config(head.config),
        # Left out, a Llama's would be 1 and 2.
        **{name: getattr(target.config, name, None) for name in _ENDS},
    }
    tensors = {name: value.detach().to(request.dtype) for name, value in head.state_dict().items()}
    places = [] if target.directory is None else [target.directory / name for name in TOKENIZER_FILES]
    return ModelFiles(config, tensors, request.dtype, copies={file.name: file for file in places if file.is_file()})


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
    file, found = read_weights(path, target.device, (WEIGHTS, INDEX, PICKLED))
    with torch.device(target.device), explain_config(path, "Llama", REMEDY):
        head = DraftLmHead(DraftLmOptions(), config)
    fill(head, _plain(config, found, file), file, remedy=REMEDY)
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


LAYOUTS = (
    Layout(
        "draft_model",
        DRAFT_MODEL,
        to_draft_model,
        load_draft_model_directory,
        {
            "vllm": Served(
                start_vllm("draft_model"),
                rules=(),
                caveats=(
                    '`"method": "draft_model"` does not settle the method alone: a path of the draft that holds `eagle-`, `eagle3`, '
                    "`dflash` or `dspark` wins, so move the folder where there is such a name in its path.",
                    'vLLM drafts greedily at every temperature; `"draft_sample_method": "probabilistic"` beside the method draws '
                    "drafts from the model's distribution.",
                ),
            ),
            "sglang": Served(
                start_sglang("STANDALONE"), rules=(), caveats=(f"The algorithm is STANDALONE. {SGLANG_ROOT}",)
            ),
            "tensorrt_llm": Served(start_tensorrt_llm_draft_model, rules=(), caveats=()),
            "llama_cpp": Served(start_llama_cpp_draft_model, rules=(), caveats=(LLAMA_CPP_SILENT,)),
            "transformers": Served(
                start_transformers,
                rules=(),
                caveats=(
                    "One prompt at a time. It changes the number of drafted tokens as it goes, unless "
                    "`num_assistant_tokens_schedule` is `constant`.",
                ),
            ),
        },
    ),
)


def _is_llama(folder: HeadFolder) -> bool:
    """A whole plain Llama; what it drafts for, its loader asks."""
    known = folder.config.get("architectures") == ["LlamaForCausalLM"]
    return known and {"norm.weight", "embed_tokens.weight"} <= folder.names


FORMATS = (Format("a draft model", 21, _is_llama, load_draft_model_directory),)
