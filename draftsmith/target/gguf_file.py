"""A target in a GGUF file: checked, dequantized once into a folder of the cache, and known by what the file holds.

transformers opens the file (`gguf_file=`); what it leaves out without a word, and a target needs, is read or refused here.
"""

import math
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub import hf_hub_download
from tokenizers.decoders import ByteFallback, Fuse, Replace
from tokenizers.decoders import Sequence as DecodersInTurn
from tokenizers.pre_tokenizers import Digits, Metaspace
from tokenizers.pre_tokenizers import Sequence as InTurn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import UserError, one_line
from draftsmith.fields import shown
from draftsmith.foreign.code import foreign_code, why_offline
from draftsmith.foreign.weights import GgufHeader, read_gguf
from draftsmith.progress import say
from draftsmith.storage import atomic_directory, claim, default_cache, fingerprint, sweep, write_json
from draftsmith.target.config import MOST_SIZE, check_causal, check_config_values, check_weights
from draftsmith.target.folder import SOURCE, describe_contents, hash_json, hash_tensor, hash_weights, read_source
from draftsmith.target.identity import TargetIdentity

AGAIN = "fetch it again"
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf")
_HEADS = ("eagle", "eagle3", "dflash", "dspark", "medusa")
"""What llama.cpp calls the architectures of draft heads."""
_EMBEDDINGS, _PROJECTION, _ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
_ENDS = ("eos", "eot", "eom")
"""The tokens that end an answer in llama.cpp: of a text, a turn, a message."""
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""llama.cpp's names of pre-tokenizers that split as GPT-2's, each digit by itself."""
_LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""The layers of the Gemmas of 27B, whose scores llama.cpp scales by the width over the heads; all others' by the width of a head."""
_AS_GPT2 = ("gpt-2", "phi-2", "olmo", "jais", "mpt")
_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "glm4", "glm5", "youtu", "minicpm5"),
)
"""llama.cpp's names of pre-tokenizers behind which a word of the vocabulary is one token, whether merges lead to it or not."""
_READING = 2
"""Raised with every change of what is made of a file, so that an earlier one is made again."""


def is_gguf(path: str | Path) -> bool:
    """Whether a path, or a Hub name owner/model/file, names a GGUF file."""
    return str(path).endswith(".gguf")


@dataclass(frozen=True)
class GgufTarget:
    """A target in a GGUF file whose header was checked. path: as the user names it."""

    path: str
    file: Path
    header: GgufHeader

    @cached_property
    def identity(self) -> TargetIdentity:
        """What distinguishes the target, from the file alone: as stored, whatever it is dequantized to.

        config and tokenizer are hashes of the file's own keys, which are never compared with those of a folder.
        """
        metadata, tensors = self.header.metadata, {span.name: span for span in self.header.tensors}
        architecture = metadata["general.architecture"]
        shape = {
            key: value
            for key, value in metadata.items()
            if key == "general.architecture" or key.startswith(f"{architecture}.")
        }
        text = {key: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
        template = metadata.get("tokenizer.chat_template")
        embeddings, projection = tensors[_EMBEDDINGS], tensors.get(_PROJECTION, tensors[_EMBEDDINGS])
        config, weights = f"gguf:{hash_json(shape)}", hash_weights(sorted(tensors.values(), key=lambda span: span.name))
        return TargetIdentity(
            path=self.path,
            vocab_size=projection.shape[0],
            hidden_size=metadata.get(f"{architecture}.embedding_length"),
            num_layers=metadata.get(f"{architecture}.block_count"),
            num_heads=heads if isinstance(heads := metadata.get(f"{architecture}.attention.head_count"), int) else None,
            fingerprint=fingerprint([config, weights]),
            config=config,
            weights=weights,
            embeddings=(embedded := hash_tensor(embeddings)),
            lm_head=(projected := hash_tensor(projection)),
            tied=embedded == projected,
            tokenizer=f"gguf:{hash_json(text)}",
            chat_template=hash_json({"default": template}) if template else None,
            eos_ids=self.eos_ids or None,
        )

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, sorted."""
        named = (self.header.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in _ENDS)
        return tuple(sorted({one for one in named if isinstance(one, int)}))

    @property
    def cached(self) -> Path:
        """Where the dequantized model lies or will lie; another version of transformers may read the file otherwise."""
        about = [self.identity.fingerprint, hash_json(self.header.metadata), transformers.__version__, _READING]
        return default_cache() / f"gguf-{fingerprint(about)}"

    @contextmanager
    def opened(self) -> Iterator[dict[str, str]]:
        """Yield the arguments with which transformers reads this file and no other: it takes what lies beside one as well."""
        with TemporaryDirectory() as alone:
            (link := Path(alone) / "model.gguf").symlink_to(self.file.resolve())
            yield {"pretrained_model_name_or_path": alone, "gguf_file": str(link)}

    def read_config(self) -> Any:
        """Return the configuration that transformers makes of the file, checked against its tensors; nothing is dequantized."""
        if read_source(self.cached) is not None:
            with foreign_code(f"The config of {self.cached} cannot be read", "remove that folder"):
                return AutoConfig.from_pretrained(self.cached)
        with foreign_code(f"Cannot open the GGUF file {self.path}", _OTHER), self.opened() as where:
            config = AutoConfig.from_pretrained(**where)
            _complete_gemma(config, self.header.metadata)
        check_config_values(config.to_dict(), self.file, AGAIN)
        check_causal(self.path, config, False)
        # Counts are compared, which the types of blocks do not change.
        check_weights(config, [replace(span, dtype="F32") for span in self.header.tensors], self.file)
        return config


def _complete_gemma(config: Any, metadata: dict[str, Any]) -> None:
    """Set what llama.cpp computes a Gemma with, and transformers takes from no file: the scale of attention scores, and the caps of
    scores and logits."""
    architecture = metadata["general.architecture"]
    if architecture not in _LARGE_GEMMAS:
        return
    large = config.num_hidden_layers == _LARGE_GEMMAS[architecture]
    config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if large else config.head_dim
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        setattr(config, name, metadata.get(f"{architecture}.{name}", getattr(config, name)))


_OTHER = "take the model in a folder of safetensors instead"


def open_gguf(path: str) -> GgufTarget:
    """Return the target in a GGUF file, a local one or owner/model/file of the Hub, its header checked.

    Raises UserError for what is no file, no whole GGUF file, a part of one, or holds another thing than a language model.
    """
    file = _find(path)
    header = read_gguf(file, AGAIN)
    _pre_tokenizers()
    metadata, names = header.metadata, {span.name for span in header.tensors}
    architecture, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    sizes = [f"{architecture}.{name}" for name in ("embedding_length", "attention.head_count", "block_count")]
    part = _PART.search(file.name)
    if (part is not None and int(part[1]) > 1) or metadata.get("split.count", 1) != 1:
        why = "is one part of a split model", "join the parts first (`llama-gguf-split --merge FIRST_PART WHOLE.gguf`)"
    elif kind == "adapter" or "adapter.type" in metadata:
        why = "holds a LoRA adapter, not a model", "merge it into its model first (`llama-export-lora`)"
    elif kind == "mmproj" or architecture == "clip":
        why = "holds the projector of a multimodal model", "give the file of its language model"
    elif architecture in _HEADS:
        why = f"holds a draft head ({architecture})", "give the model that it drafts for"
    elif not isinstance(architecture, str) or _EMBEDDINGS not in names:
        why = "holds no language model (no architecture, or no embeddings)", "give another file"
    elif not isinstance(metadata.get("tokenizer.ggml.tokens"), list):
        why = "holds no tokenizer", _OTHER
    elif odd := next((key for key in sizes if not _is_size(key, metadata.get(key), len(names))), None):
        claim = f"says that {odd} is {shown(metadata[odd])}" if odd in metadata else f"does not say {odd}"
        why = f"{claim}, and holds {len(names)} tensors", AGAIN
    else:
        return GgufTarget(path, file, header)
    raise UserError(f"The target {path} {why[0]}: {why[1]}.")


def _is_size(key: str, value: Any, tensors: int) -> bool:
    """Whether a size, or a list with one for each layer, is possible: no more layers than tensors, and not all zero."""
    numbers, most = value if isinstance(value, list) else [value], tensors if key.endswith("block_count") else MOST_SIZE
    return bool(numbers) and all(type(one) is int and 0 <= one <= most for one in numbers) and max(numbers) > 0


def _find(path: str) -> Path:
    """Return the local file, fetched from the Hub if need be."""
    file = Path(path).expanduser()
    if os.path.lexists(file) or path.startswith((".", "/", "~")) or path.count("/") < 2:
        return file
    why_offline()
    owner, model, name = path.split("/", 2)
    remedy = "check its path, or for a Hub name (owner/model/file.gguf) its spelling and the network"
    with foreign_code(f"The target {one_line(path)} is neither a file here nor could be fetched", remedy):
        return Path(hf_hub_download(f"{owner}/{model}", name))


def model_folder(path: str) -> Path:
    """Return the folder with the model of a GGUF file, dequantized first where the cache lacks it; of any other path, the path.

    The weights are kept in the narrowest of bfloat16, float16 and float32 that holds each of them exactly. The folder appears
    under its name when it is complete, one that was damaged is made again, and processes that start together wait for the first.
    Raises UserError as `open_gguf`, where transformers does not read the whole file, and where the cache cannot be written.
    """
    if not is_gguf(path):
        return Path(path)
    target = open_gguf(path)
    folder, cache = target.cached, default_cache()
    if read_source(folder) is None:
        with closing(claim(cache / ".lock", wait=True, elsewhere="DRAFTSMITH_CACHE")):
            sweep(cache, levels=0)
            if read_source(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)  # one that was damaged
                started = time.monotonic()
                say(f"Dequantizing {path} into {folder} (once)")
                with atomic_directory(folder, "DRAFTSMITH_CACHE") as unfinished:
                    _write_model(target, unfinished)
                say(f"Dequantized in {time.monotonic() - started:.0f} s")
    kind = _unknown_split(target)
    if kind is not None and kind not in _DIGITS:
        say(
            f"warning: {path} splits text as {kind!r}, which is not known here: it is split as GPT-2 does, so that some "
            "texts may be other tokens than in llama.cpp: compare its llama-tokenize with `draftsmith inspect`."
        )
    return folder


def _write_model(target: GgufTarget, folder: Path) -> None:
    """Write the model, its tokenizer, and the record of the file that they come from."""
    config = target.read_config()
    with foreign_code(f"Cannot open the GGUF file {target.path}", _OTHER), target.opened() as where:
        model, info = AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    model.config.rope_parameters = _rope(target, model.config)
    # Each number of the file is one of the model, and the reverse: transformers passes over tensors that it does not
    # know, and draws at random what it lacks.
    missing = info["missing_keys"]
    if missing:
        raise UserError(f"The target {target.path} has no weights for {min(missing)}: {AGAIN}, or {_OTHER}.")
    unused = {_ROPE, *([_PROJECTION] if model.config.tie_word_embeddings else [])}
    stored = sum(math.prod(span.shape) for span in target.header.tensors if span.name not in unused)
    read = sum({value.data_ptr(): value.numel() for value in model.state_dict().values()}.values())
    if stored != read:
        raise UserError(
            f"The target {target.path} holds {stored} weights, of which transformers {transformers.__version__} reads {read}: "
            f"{_OTHER}."
        )
    _split_text(target, tokenizer)
    # Else `save_pretrained` refuses a model that was quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    if target.eos_ids:
        known = model.generation_config.eos_token_id  # of some architectures, more than the file says
        model.generation_config.eos_token_id = sorted({*target.eos_ids, *(known if isinstance(known, list) else [])})
    # The narrowest dtype that holds every weight exactly.
    tensors = list(model.state_dict().values())
    exact = (torch.bfloat16, torch.float16)
    model.to(
        next((d for d in exact if all(torch.equal(t.to(d).float(), t) for t in tensors)), torch.float32)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record = {"identity": target.identity.to_json(), "contents": describe_contents(folder)}
    write_json(folder / SOURCE, record)


def _rope(target: GgufTarget, config: Any) -> Any:
    """Return the rotary parameters of a model, with the scaling that the file stores: linear, or Llama 3.1's (as factors of the
    frequencies).

    transformers reads no scaling. Raises UserError for any other.
    """
    metadata, rope = target.header.metadata, config.rope_parameters
    architecture = metadata["general.architecture"]
    factor = metadata.get(f"{architecture}.rope.scaling.factor", metadata.get(f"{architecture}.rope.scale_linear"))
    # A factor without a type scales, as in llama.cpp.
    kind = metadata.get(f"{architecture}.rope.scaling.type", "linear" if factor and factor != 1 else "none")
    turned = metadata.get(f"{architecture}.rope.dimension_count")
    if turned and architecture in ("stablelm", "nemotron", "phi3") and "rope_theta" in rope:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = rope | {"partial_rotary_factor": turned / head_dim}
    if (base := metadata.get(f"{architecture}.rope.freq_base")) and "rope_theta" in rope:
        rope = rope | {"rope_theta": base}  # which transformers does not read of every architecture
    factors = next((span for span in target.header.tensors if span.name.startswith("rope_f")), None)
    alike = "full_attention" not in rope  # else a set for each kind of layer, of which Gemma 3 scales this one alone
    own = rope if alike else rope["full_attention"]
    if factors is None and (kind == "none" or own.get("rope_type") != "default"):
        return rope
    if factors is None and kind == "linear" and type(factor) is float and factor > 0:
        scaled = own | {"rope_type": "linear", "factor": factor}
        if alike or architecture == "gemma3":
            return scaled if alike else rope | {"full_attention": scaled}
    if alike and factors is not None and factors.name == _ROPE and factors.dtype == "F32":
        with target.file.open("rb") as file:
            file.seek(factors.start)
            stored = torch.frombuffer(bytearray(file.read(factors.size)), dtype=torch.float32)
        if bool((stored == 1).all()):
            return rope
        scaled = rope | {"rope_type": "llama3", "factor": round(float(stored.max()), 4)}
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        config.rope_parameters = scaled
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** (-torch.arange(len(stored)) / len(stored))
        if frequencies.shape == stored.shape and torch.allclose(plain / stored, frequencies, rtol=1e-4):
            return scaled
    raise UserError(f"The target {target.path} scales its rotary positions as transformers does not read: {_OTHER}.")


def _pre_tokenizers() -> Collection[str]:
    """Return the names of pre-tokenizers that transformers knows. Raises UserError for one that knows none."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        raise UserError(
            f"GGUF files need transformers 5.18 or newer, and {transformers.__version__} is installed: "
            "`pip install --upgrade transformers`."
        ) from error
    return GGUF_PRE_TOKENIZER_SPLITS  # type: ignore[no-any-return]


def _unknown_split(target: GgufTarget) -> str | None:
    """Return the name of the file's pre-tokenizer where transformers does not know it and splits as GPT-2 does."""
    metadata = target.header.metadata
    kind = metadata.get("tokenizer.ggml.pre", "default")
    known = metadata.get("tokenizer.ggml.model") != "gpt2" or kind in (*_pre_tokenizers(), *_AS_GPT2)
    return None if known else str(kind)


def _split_text(target: GgufTarget, tokenizer: Any) -> None:
    """Let the tokenizer make tokens of a text as llama.cpp does by what the file says, where transformers does otherwise."""
    metadata, backend = target.header.metadata, tokenizer.backend_tokenizer
    if _unknown_split(target) in _DIGITS:
        backend.pre_tokenizer = InTurn([Digits(individual_digits=True), backend.pre_tokenizer])
    if metadata.get("tokenizer.ggml.model") == "gpt2" and metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if metadata.get("tokenizer.ggml.add_space_prefix") is False and isinstance(backend.pre_tokenizer, Metaspace):
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
        backend.decoder = DecodersInTurn([Replace("\u2581", " "), ByteFallback(), Fuse()])
