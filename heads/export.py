"""Native head in, engine directory out: validated before it is written, read back before it is kept.

Shapes: H hidden, A aux layers, V target vocab, W draft vocab.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import LlamaConfig

from draftsmith.data.batch import TrainBatch
from draftsmith.errors import UserError
from draftsmith.heads.base import DraftHead
from draftsmith.heads.checkpoint import (
    EMBEDDING,
    WEIGHTS,
    atomic_directory,
    borrows_embedding,
    fill,
    read_config,
    read_tensors,
    write_model_files,
)
from draftsmith.heads.contracts import EAGLE3, EAGLE3_LLAMA_CPP, FLOATS, Contract, validate
from draftsmith.heads.eagle3 import Eagle3Head
from draftsmith.heads.eagle3_options import Eagle3Options
from draftsmith.heads.target import Target

NATIVE_LAYER, FLAT_LAYER = "layers.0.", "midlayer."
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory holds: config.json and the tensors of model.safetensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """A way to write a head: the contract it must meet, and how to convert to it and back.

    methods: the drafters it can hold. convert(head, target, dtype) -> files; load(path, target) -> head.
    """

    contract: Contract
    methods: tuple[str, ...]
    convert: Callable[[Any, Target, torch.dtype], ModelFiles]
    load: Callable[[Path, Target], DraftHead]


def export_head(
    head: DraftHead,
    target: Target,
    dest: Path | str,
    *,
    layout: str = "eagle3",
    dtype: str | torch.dtype | None = None,
    include_embeddings: bool = False,
) -> Path:
    """Write `head` as the directory `dest` that a serving engine loads, and return its path.

    layout: a name in LAYOUTS. dtype: of the float tensors, None for the target's. include_embeddings: store the
    input embeddings too; engines otherwise share the target's. The head itself is not changed.
    Raises UserError where the layout cannot hold the head, and for a destination that cannot be written;
    nothing is left behind then. What was written is loaded again and must give the same logits.
    """
    if layout not in LAYOUTS:
        raise UserError(f"export.layout is {layout!r}: choose one of {', '.join(LAYOUTS)}.")
    chosen = LAYOUTS[layout]
    if head.method not in chosen.methods:
        raise UserError(
            f"The layout {layout} holds {', '.join(chosen.methods)} heads, not {head.method}: choose another."
        )
    files = chosen.convert(head, target, _dtype(dtype, target))
    if not include_embeddings and borrows_embedding(head.get_parameter(EMBEDDING), target):
        del files.tensors[EMBEDDING]
    validate(files.tensors, files.config, chosen.contract)
    with atomic_directory(Path(dest)) as temporary:
        write_model_files(temporary, files.config, files.tensors)
        reloaded = chosen.load(temporary, target)
        assert same_logits(head, reloaded, files), "the export gives other logits"
    return Path(dest)


@torch.no_grad()
def same_logits(head: DraftHead, reloaded: DraftHead, files: ModelFiles) -> bool:
    """Whether both heads give equal logits on random input, `head` with its weights rounded to the files' dtype.

    Both use the target's embedding unless the files hold one.
    """
    dtype, stored = DTYPES[files.config["torch_dtype"]], dict(reloaded.named_parameters())
    rounded = {
        name: stored[name] if name == EMBEDDING and EMBEDDING not in files.tensors else value.to(dtype).to(stored[name])
        for name, value in head.named_parameters()
    }
    batch = _random_batch(reloaded, stored[EMBEDDING].device)
    ours, theirs = functional_call(head, rounded, (batch, 3)), reloaded(batch, 3)
    return all(torch.equal(a.logits, b.logits) for a, b in zip(ours.steps, theirs.steps, strict=True))


def to_flat_eagle3(head: Eagle3Head, target: Target, dtype: torch.dtype) -> ModelFiles:
    """Convert to the flat EAGLE-3 layout; the embeddings are included."""
    tensors = {
        name.replace(NATIVE_LAYER, FLAT_LAYER): value.detach().to(dtype)
        for name, value in head.state_dict().items()
        if name != "draft_vocab"
    }
    V, device = target.vocab_size, head.fc.weight.device
    ids = torch.arange(V, device=device) if head.draft_vocab is None else head.draft_vocab
    t2d = torch.zeros(V, dtype=torch.bool, device=device).index_fill_(0, ids, True)
    d2t = ids - torch.arange(len(ids), device=device)
    return ModelFiles(flat_config(head, target, dtype), {**tensors, "d2t": d2t, "t2d": t2d})


def flat_config(head: Eagle3Head, target: Target, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json of the flat EAGLE-3 layout; every key that engines have differing defaults for is there."""
    rope: dict[str, Any] = dict(head.config.rope_parameters)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **head.describe()["layer_config"],
        "num_hidden_layers": 1,
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": target.hidden_size,
        "rope_theta": float(rope["rope_theta"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(head.layer_ids),
        **{flag: getattr(head.options, flag) for flag in FLAGS},
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if len(head.layer_ids) != 3:
        config["num_aux_hidden_states"] = len(head.layer_ids)
    return config


def load_eagle3_directory(path: Path | str, target: Target) -> Eagle3Head:
    """Return the head in a flat EAGLE-3 directory, ours or another tool's, fp32, on the target's device.

    Reads the layer's tensors under `midlayer.` or `layers.0.`; a missing embedding is the target's. Raises UserError
    for anything missing or misshapen and for a head of another target's dimensions.
    """
    path = Path(path)
    config, tensors = read_config(path), read_tensors(path, target.device)
    _check_dimensions(path, config, target)
    tensors = {name.replace(FLAT_LAYER, NATIVE_LAYER): value for name, value in tensors.items() if name != "t2d"}
    draft_vocab = _draft_vocab(path, config, tensors.pop("d2t", None), target)
    layer = LlamaConfig.from_dict({**config, "vocab_size": target.vocab_size})
    layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or list(target.default_layer_ids())
    target.check_layer_ids(tuple(layer_ids))
    W = target.vocab_size if draft_vocab is None else len(draft_vocab)
    options = Eagle3Options(
        layer_ids=list(layer_ids), draft_vocab_size=W, **{flag: bool(config.get(flag, False)) for flag in FLAGS}
    )
    with torch.device(target.device):
        head = Eagle3Head(options, layer, layer_ids, target.embedding, draft_vocab)
    fill(head, tensors if draft_vocab is None else {**tensors, "draft_vocab": draft_vocab}, path / WEIGHTS)
    return head


LAYOUTS: dict[str, Layout] = {
    "eagle3": Layout(EAGLE3, ("eagle3",), to_flat_eagle3, load_eagle3_directory),
    "eagle3_llama_cpp": Layout(EAGLE3_LLAMA_CPP, ("eagle3",), to_flat_eagle3, load_eagle3_directory),
}


def _dtype(dtype: str | torch.dtype | None, target: Target) -> torch.dtype:
    name = str(target.dtype if dtype in (None, "auto") else dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"export.dtype is {name!r}: choose one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def _check_dimensions(path: Path, config: Mapping[str, Any], target: Target) -> None:
    expected = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    for key, value in expected.items():
        if config.get(key) != value:
            raise UserError(
                f"{path}/config.json says {key} {config.get(key)}, but the target {target.path} has {value}: give the "
                "target this head was made for."
            )


def _draft_vocab(path: Path, config: Mapping[str, Any], d2t: Tensor | None, target: Target) -> Tensor | None:
    """Return the sorted target ids that `d2t` (offsets) stands for, None for the whole vocabulary."""
    W = config.get("draft_vocab_size") or target.vocab_size
    if d2t is None and target.vocab_size != W:
        raise UserError(f"{path} lacks the tensor d2t, but its draft vocabulary has {W} of {target.vocab_size} tokens.")
    if d2t is None or target.vocab_size == W:
        return None
    ids = torch.arange(len(d2t), device=d2t.device) + d2t
    if len(ids) != W or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or not bool((ids.diff() > 0).all()):
        raise UserError(f"{path}: d2t does not hold {W} offsets of ascending target ids; export the head again.")
    return ids


def _random_batch(head: DraftHead, device: torch.device, length: int = 12) -> TrainBatch:
    """One document of random tokens and streams, all of it to be learned."""
    generator = torch.Generator().manual_seed(0)
    embedding = head.get_parameter(EMBEDDING)
    V, H = embedding.shape
    return TrainBatch(
        ids=torch.randint(V, (1, length), generator=generator),
        mask=torch.ones(1, length, dtype=torch.bool),
        document=torch.zeros(1, length, dtype=torch.int64),
        position=torch.arange(length)[None],
        aux=torch.randn(1, length, len(head.layer_ids) * H, generator=generator),
        last=torch.zeros(1, length, H),
        top1=torch.zeros(1, length, dtype=torch.int64),
        logsumexp=torch.zeros(1, length),
    ).to(device)
