"""Opening a model with transformers; whatever is wrong with it is a UserError of one sentence.

`check_taken` refuses a checkpoint that was not taken whole, `check_target` one of which our taps, states and logits are not the
model's own.

Shapes: B = 2 rows that differ in their last token only, n tokens, V target vocab.
"""

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from draftsmith.errors import UserError, first_line, why_not
from draftsmith.foreign.code import foreign_code, why_offline
from draftsmith.foreign.weights import TensorSpan
from draftsmith.target.config import (
    UNQUANTIZED,
    attention_of,
    check_causal,
    check_dtypes,
    check_layer_types,
    check_quantization,
    check_weights,
    how_to_read,
    opener_of,
    read_model_config,
)
from draftsmith.target.folder import TOKENIZER_FILES, read_directory, read_eos_ids, weight_files
from draftsmith.target.gguf_file import is_gguf, model_folder, open_gguf
from draftsmith.target.kernels import GROUPED
from draftsmith.target.layers import share, spread

if TYPE_CHECKING:
    from draftsmith.target.target import Target

DTYPES = ("float32", "bfloat16", "float16")
# transformers' table of what was not taken from a file: `check_taken` refuses it, or says it in a line.
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())
_MTP = re.compile(r"(^|[._])(mtp|nextn)([._]|$)")
_OF_MTP_LAYER = re.compile(r"\.(eh_proj|enorm|hnorm|shared_head)\b")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OTHER_INPUTS = re.compile(
    r"vision|visual|image|video|audio|speech|talker|2wav|multi_?modal|mm_projector|resampler|perceiver"
)
"""Modules beside the text decoder, in the part of a name above its layers."""
_OF_QUANTIZED = re.compile(
    r"(scales?(_inv|_\d)?|qscale_(weight|act)|zero_?points?|zeros|_packed|_shape|g_idx|qweight|\.biases|SCB|scb|amax|absmax|quant_map"
    r"|codes|codebooks|weight_format)$|quant_state"
)
_OF_CACHE = re.compile(r"att.*\b((k|v|kv|q|prob)_(scale|zero_point)|[kv]_proj\.output_scale)$")
"""Scales of keys and values, for engines that are told to keep these in 8 bits; the weights are the same without them."""
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|position_ids|num_batches_tracked|(en|de)coder\.version)$")
"""Tables of earlier versions that hold nothing learned."""


def open_model(
    path: str,
    *,
    dtype: str,
    device: str | torch.device,
    attn_implementation: str,
    trust_remote_code: bool,
    gpus: int = 1,
    tensor_parallel: int = 1,
) -> tuple[Any, Path, str]:
    """Load a causal language model from a local folder, a Hub name or a GGUF file; never pickled weights. Return it, the folder its files
    came from, and a sentence about modules in them that it leaves, "" for none.

    Raises UserError for: a missing path, a folder that is no model, an encoder-only or encoder-decoder model, a type
    transformers does not know, layers that keep a state, missing, pickled or damaged weights, weights that the model does not
    take, an unknown dtype, a missing device.
    """
    try:
        where = torch.empty(1, device=device).device  # with its number, which threads of transformers would not know
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
    # Each tensor goes straight there: whole models of several processes would not fit into a machine's memory. Quantizers would
    # take a GPU by themselves.
    places = None if where.type == "cpu" and quantized is None else {"": where}
    shared = {}
    if tensor_parallel > 1:
        shared = {"distributed_config": share(path, config, tensor_parallel, torch.device(device), gpus)}
    elif gpus > 1:
        places = spread(path, config, where, gpus, trust_remote_code)
    smaller = {"out of memory": ", or take a device with more free memory"}
    with foreign_code(f"Cannot load the target {path}", how_to_read(quantized), smaller):
        model, info = opener_of(config).from_pretrained(
            source,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention,
            **(shared or {"device_map": places}),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # told by `check_taken`, by name
            output_loading_info=True,
        )
    beside = check_taken(path, model, info, spans, quantized)
    check_layer_types(path, model.config, type(model))  # of code that came with it, too
    if where.type == "cpu" and attention == "sdpa":
        model.set_attn_implementation(GROUPED)
    return model, directory, beside


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
    remedy = "check its path"
    if not Path(path).exists():
        remedy += ", or for a Hub name its spelling and the network"
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
                    if name != "model.safetensors":
                        get_checkpoint_shard_files(path, weights)
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


def check_taken(
    path: str, model: Any, info: Mapping[str, Any], spans: Sequence[TensorSpan], quantized: str | None
) -> str:
    """Return a sentence about what a checkpoint holds beside the model (MTP layers, vision towers, scales of a cache), "" for none.

    transformers drops a tensor that a class has no place for, such as the scale of a quantized weight or a bias that the
    configuration denies, and reads the numbers of a float8 or integer weight as they stand: either way it computes another model.

    info: what transformers says of the loading. Raises UserError, naming a tensor, where the model did not take one of its own,
    lacks one, takes another shape, needs the scale of a quantized weight, or where config.json ties two tensors that differ.
    """
    held, name = model.state_dict(), type(model).__name__
    unexpected = set(info["unexpected_keys"])
    masks = {s.name for s in spans if s.shape[:2] == (1, 1) and len(s.shape) == 4}  # of earlier versions
    on_purpose = [re.compile(one) for one in model._keys_to_ignore_on_load_unexpected or ()]
    ignored = {s.name for s in spans if s.name not in held and any(one.search(s.name) for one in on_purpose)}
    left = (unexpected | ignored) - masks
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    modules, lost = _sorted_out(left, unexpected, spans, layers, quantized)
    if parts := list(filter(_OF_QUANTIZED.search, lost)):
        raise UserError(
            f"The target {path} holds {_and_more(parts)}, for which {name} has no place; it is a part of quantized weights, which "
            f"would be taken for others without it: {UNQUANTIZED}."
        )
    if not quantized:
        check_dtypes(path, [span for span in spans if span.name not in left], held)
    if mismatched := sorted(info["mismatched_keys"]):
        tensor, there, wanted = mismatched[0]
        raise UserError(
            f"The target {path} holds {tensor} in the shape {list(there)} where {name} takes {list(wanted)}: they are of different "
            f"models, or not quantized as config.json says; {how_to_read(quantized)}."
        )
    if bare := [n for n, m in model.named_modules() if type(m) is nn.Linear and m.weight.dtype.itemsize < 2]:
        raise UserError(
            f"The target {path} has no scale for the quantized weight of {_and_more(bare)}: {how_to_read(quantized)}."
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"The target {path} has no weights for {_and_more(missing)}: it was saved without its "
            "language-model head or incompletely; save it as a causal language model."
        )
    if apart := sorted(model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys):
        raise UserError(
            f"The target {path} holds its own {apart[0]}, but its config.json ties that to the embeddings (tie_word_embeddings): "
            "serving engines compute with the embeddings, transformers with both; set tie_word_embeddings to false, or take that "
            "tensor out of the file if the model is tied."
        )
    if lost:
        raise UserError(
            f"The target {path} holds {_and_more(lost)}, for which {name} has no place; without it this is another model: see that "
            "config.json belongs to these weights (num_hidden_layers, attention_bias, mlp_bias), or fetch the target again."
        )
    if not modules:
        return ""
    listed = "; ".join(f"{what}: {_and_more(names)}" for what, names in modules.items())
    return f"the target {path} is used without what its files hold beside the decoder ({listed})"


def _sorted_out(
    left: set[str], unexpected: set[str], spans: Iterable[TensorSpan], layers: int, quantized: str | None
) -> tuple[dict[str, list[str]], list[str]]:
    """Sort tensors that the model left: into modules beside the decoder, by what these are, and those that the model needs.

    unexpected: tensors that the class does not leave on purpose. layers: of the decoder; a layer above them is MTP's, or missing.
    """
    names = [span.name for span in spans if _OF_MTP_LAYER.search(span.name)]
    of_mtp = {found[1] for name in names if (found := _LAYER.search(name))}
    modules: dict[str, list[str]] = {}
    lost = []
    for name in sorted(left):
        layer = _LAYER.search(name)
        beyond = layer is not None and int(layer[1]) >= layers
        if _MTP.search(name) or (beyond and layer is not None and layer[1] in of_mtp):
            modules.setdefault("MTP layers", []).append(name)
        elif _OTHER_INPUTS.search(name[: layer.start()] if layer else name):
            modules.setdefault("other inputs than text", []).append(name)
        elif not quantized and not beyond and _OF_CACHE.search(name):
            modules.setdefault("scales of an 8-bit cache", []).append(name)
        elif (name in unexpected and not _BUFFERS.search(name)) or beyond or _OF_QUANTIZED.search(name):
            lost.append(name)
    return modules, lost


def _and_more(names: Sequence[str]) -> str:
    return f"{names[0]}{f' and {len(names) - 1} more tensors' if len(names) > 1 else ''}"


@torch.no_grad()
def check_target(target: "Target") -> None:
    """Compare taps, final states and logits of `target` with its model's own, and set the head's scale and softcap.

    Raises UserError, naming the model type, where a later token changes an earlier state (as in an encoder), a tap differs
    from `output_hidden_states` (if the model gives any), or the logits are not the lm_head's under any known scale and softcap.
    """
    model, ids = target.model, probe_ids(target)
    every_layer = tuple(range(target.num_layers))
    what = f"The target {target.path} of type {target.model_type!r} does not run by itself"
    with foreign_code(what, "choose another target"):
        with _hooks_left_as_they_are(model):
            truth = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        seen = target.forward(ids, layer_ids=every_layer)
    if not (bool(seen.last.isfinite().all()) and bool(truth.logits.isfinite().all())):
        for name, weight in target.model.named_parameters():
            if not bool(weight.isfinite().all()):
                raise UserError(
                    f"The target {target.path} has NaN or infinity in its weights ({name}): fetch it again."
                )
        raise UserError(
            f"The target {target.path} computes NaN or infinity in {target.dtype_name}, though its weights are finite: set "
            "target.dtype to float32 or bfloat16."
        )
    if not is_close(seen.last[0, :-1], seen.last[1, :-1], loose=True):
        raise UserError(
            f"The target {target.path} ({target.model_type}) lets later tokens change earlier ones, as an "
            "encoder-only model does: choose a decoder-only causal language model."
        )
    if seen.aux.shape != (*ids.shape, target.num_layers * target.hidden_size):
        raise _refusal(target, "its residual streams are not one vector of hidden_size per token")
    hidden_states = getattr(truth, "hidden_states", None)
    streams = seen.aux.unflatten(-1, (target.num_layers, target.hidden_size))
    if hidden_states is not None and len(hidden_states) == target.num_layers + 1:
        for k in every_layer:
            if not is_close(streams[..., k, :], hidden_states[k]):
                raise _refusal(target, f"the stream entering layer {k} is not its hidden_states[{k}]")
    for scale, softcap in _head_rules(target.config):
        target.head.scale, target.head.softcap = scale, softcap
        if is_close(target.head.logits(seen.last), truth.logits):
            return
    raise _refusal(target, "its logits are not the lm_head's product under any known scale or softcap")


@contextmanager
def _hooks_left_as_they_are(model: nn.Module) -> Iterator[None]:
    """Take out the hooks that transformers leaves in every layer of which hidden states were asked: each costs as much as a small
    product in every later pass."""
    before = [(module, module._forward_hooks.copy()) for module in model.modules()]
    yield
    for module, hooks in before:
        module._forward_hooks.clear()
        module._forward_hooks.update(hooks)
        vars(module).pop("_output_capturing_hooks_installed", None)


def probe_ids(target: "Target") -> Tensor:
    """Return ids [2, n] away from both ends of the vocabulary, where special tokens are; rows differ in the last one."""
    vocab = target.embedding.shape[0]
    # On the CPU also where a head is being built on another device.
    generator, most = torch.Generator().manual_seed(0), max(vocab // 2, vocab // 4 + 2)
    row = torch.randint(vocab // 4, most, (8,), generator=generator, device="cpu")
    other = row.clone()
    other[-1] = vocab // 4 + (row[-1] - vocab // 4 + 1) % max(vocab // 4, 2)
    return torch.stack((row, other)).to(target.device)


def _head_rules(config: Any) -> Iterator[tuple[float, float | None]]:
    """Yield (scale, softcap) pairs to try, what the config names first.

    Cohere multiplies by `logit_scale`, Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it;
    Gemma and others cap by `final_logit_softcapping`.
    """
    scales: list[float] = []
    if multiplier := getattr(config, "logit_scale", None):
        scales.append(float(multiplier))
    if divisor := getattr(config, "logits_scaling", None):
        scales += [1.0 / float(divisor), float(divisor)]
    softcap = getattr(config, "final_logit_softcapping", None)
    softcaps = [float(softcap), None] if softcap else [None]
    yield from itertools.product([*scales, 1.0], softcaps)


def is_close(ours: Tensor, theirs: Tensor, loose: bool = False) -> bool:
    """Return whether two tensors are equal up to rounding in the dtype of `theirs`, relative to its largest entry."""
    if ours.shape != theirs.shape:
        return False
    tolerance = 1e-4 if theirs.dtype == torch.float32 else 2e-2
    difference = (ours.float() - theirs.float()).abs().max()
    return bool(difference <= (10 if loose else 1) * tolerance * theirs.float().abs().max())


def _refusal(target: "Target", reason: str) -> UserError:
    return UserError(
        f"The target {target.path} of type {target.model_type!r} cannot be used yet: {reason}; choose another target."
    )
