"""The lines that start an engine on an export, ready to be pasted: for its README, and for docs/export.md.

A layout names one of the `start_...` functions for each engine that reads it.
"""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass

GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
RESERVED_PATH_WORDS = re.compile("eagle-|eagle3|dflash|dspark")
"""Names in a draft's path that vLLM takes for a method, even beside "method": "medusa"."""


ADAPTER_NAME = "tuned"
"""What requests call the target with its adapter."""
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Adapter:
    """What makes the target the one that the heads draft for. folder: of the adapter; rank: of its matrices."""

    folder: str
    rank: int


@dataclass(frozen=True)
class Serving:
    """What is served. draft: the export's folder; target: a folder or a Hub name; tokens: to draft per pass.

    dtype: of the export. layer_ids: the layers that an EAGLE-3 head reads. heads: of Medusa. adapter: the target's, where
    the heads draft for the target with that.
    """

    draft: str
    target: str
    tokens: int
    dtype: str = "bfloat16"
    gpus: int = 1
    layer_ids: tuple[int, ...] = ()
    heads: int = 0
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Snippet:
    """Text to paste: for a shell (bash), or as the file `file` (yaml, python)."""

    language: str
    text: str
    file: str = ""


def _shell(*lines: list[str]) -> Snippet:
    """Lines of words, one command; all but the first indented."""
    return Snippet("bash", " \\\n    ".join(shlex.join(line) for line in lines) + "\n")


def start_vllm(method: str, **more: bool) -> Callable[[Serving], list[Snippet]]:
    """vLLM with the method of that name; more: further keys of its configuration."""

    def lines(serving: Serving) -> list[Snippet]:
        config = {"method": method, "model": serving.draft, "num_speculative_tokens": serving.tokens, **more}
        words = ["vllm", "serve", serving.target, *_option("--tensor-parallel-size", serving.gpus)]
        speculative = ["--speculative-config", json.dumps(config)]
        if serving.adapter is None:
            return [_shell([*words, *speculative])]
        return [_shell(words, _vllm_adapter(serving.adapter), speculative)]

    return lines


def _vllm_adapter(adapter: Adapter) -> list[str]:
    """Return the words with which vLLM serves an adapter, for requests whose model is ADAPTER_NAME."""
    # vLLM takes no other ranks.
    room = next((rank for rank in _VLLM_RANKS if rank >= adapter.rank), adapter.rank)
    return ["--enable-lora", "--max-lora-rank", f"{room}", "--lora-modules", f"{ADAPTER_NAME}={adapter.folder}"]


def start_vllm_speculators(serving: Serving) -> list[Snippet]:
    """vLLM started on the draft, which names the target."""
    return [_shell(["vllm", "serve", serving.draft, *_option("--tensor-parallel-size", serving.gpus)])]


def start_speculators(serving: Serving) -> list[Snippet]:
    """The speculators package."""
    code = f"from speculators import SpeculatorModel; SpeculatorModel.from_pretrained({serving.draft!r})"
    return [_shell(["python", "-c", code])]


def start_sglang(algorithm: str) -> Callable[[Serving], list[Snippet]]:
    """SGLang with the algorithm of that name."""

    def lines(serving: Serving) -> list[Snippet]:
        K = serving.tokens
        server = ["python", "-m", "sglang.launch_server", "--model-path", serving.target]
        chain = ["--speculative-num-steps", f"{K}", "--speculative-eagle-topk", "1"]
        return [
            _shell(
                [*server, "--speculative-algorithm", algorithm, *_option("--tp-size", serving.gpus)],
                ["--speculative-draft-model-path", serving.draft],
                [*chain, "--speculative-num-draft-tokens", f"{K + 1}"],
            )
        ]

    return lines


def start_tensorrt_llm(serving: Serving) -> list[Snippet]:
    """TensorRT-LLM with an EAGLE-3 head."""
    layers = ", ".join(str(k - 1) for k in serving.layer_ids)
    text = (
        "speculative_config:\n"
        "  decoding_type: Eagle3\n"
        f"  max_draft_len: {serving.tokens}\n"
        f"  speculative_model: {json.dumps(serving.draft)}\n"
        f"  eagle3_layers_to_capture: [{layers}]\n"
    )
    words = ["trtllm-serve", serving.target, "--extra_llm_api_options", "trtllm.yaml"]
    return [Snippet("yaml", text, "trtllm.yaml"), _shell([*words, *_option("--tp_size", serving.gpus)])]


def start_tensorrt_llm_draft_model(serving: Serving) -> list[Snippet]:
    """TensorRT-LLM with a draft model."""
    text = (
        "speculative_config:\n"
        "  decoding_type: DraftTarget\n"
        f"  max_draft_len: {serving.tokens}\n"
        f"  speculative_model: {json.dumps(serving.draft)}\n"
    )
    words = ["trtllm-serve", serving.target, "--extra_llm_api_options", "trtllm.yaml"]
    return [Snippet("yaml", text, "trtllm.yaml"), _shell([*words, *_option("--tp_size", serving.gpus)])]


def start_tensorrt_llm_medusa(serving: Serving) -> list[Snippet]:
    """TensorRT-LLM with Medusa heads, which its converter builds in."""
    return [
        _shell(
            ["python", "examples/medusa/convert_checkpoint.py", "--model_dir", serving.target],
            ["--medusa_model_dir", serving.draft, "--num_medusa_heads", f"{serving.heads}"],
            ["--dtype", serving.dtype, "--output_dir", "checkpoint", *_option("--tp_size", serving.gpus)],
        )
    ]


def start_llama_cpp(spec_type: str) -> Callable[[Serving], list[Snippet]]:
    """llama.cpp with the `--spec-type` of that name."""

    def lines(serving: Serving) -> list[Snippet]:
        kind = ["--outtype", GGUF_TYPES[serving.dtype]]
        convert = ["python", "convert_hf_to_gguf.py"]
        server = ["llama-server", "-m", "target.gguf", "-md", "draft.gguf", "--spec-type", spec_type]
        return [
            _shell([*convert, serving.target, "--outfile", "target.gguf", *kind]),
            _shell([*convert, serving.draft, "--target-model-dir", serving.target, "--outfile", "draft.gguf", *kind]),
            _shell([*server, "--spec-draft-n-max", f"{serving.tokens}"]),
        ]

    return lines


def start_llama_cpp_draft_model(serving: Serving) -> list[Snippet]:
    """llama.cpp with a draft model."""
    kind = ["--outtype", GGUF_TYPES[serving.dtype]]
    convert = ["python", "convert_hf_to_gguf.py"]
    server = ["llama-server", "-m", "target.gguf", "-md", "draft.gguf", "--spec-type", "draft-simple"]
    return [
        _shell([*convert, serving.target, "--outfile", "target.gguf", *kind]),
        _shell([*convert, serving.draft, "--outfile", "draft.gguf", *kind]),
        _shell([*server, "--spec-draft-n-max", f"{serving.tokens}"]),
    ]


def start_transformers(serving: Serving) -> list[Snippet]:
    """transformers' assisted generation."""
    text = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"target = {json.dumps(serving.target)}\n"
        "tokenizer = AutoTokenizer.from_pretrained(target)\n"
        "model = AutoModelForCausalLM.from_pretrained(target)\n"
        f"draft = AutoModelForCausalLM.from_pretrained({json.dumps(serving.draft)})\n"
        f"draft.generation_config.num_assistant_tokens = {serving.tokens}\n"
        'messages = [{"role": "user", "content": "What is two plus two?"}]\n'
        'ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)\n'
        "answer = model.generate(**ids, assistant_model=draft, max_new_tokens=64)\n"
        'print(tokenizer.decode(answer[0, ids["input_ids"].shape[1] :]))\n'
    )
    return [Snippet("python", text, "assisted.py")]


def start_tgi(serving: Serving) -> list[Snippet]:
    """TGI, which loads the target that the export names."""
    words = ["text-generation-launcher", "--model-id", serving.draft, "--speculate", f"{serving.tokens}"]
    return [_shell([*words, *_option("--num-shard", serving.gpus)])]


def start_medusa_original(serving: Serving) -> list[Snippet]:
    """Medusa's own code."""
    return [_shell(["python", "-m", "medusa.inference.cli", "--model", serving.draft])]


def start_hydra_original(serving: Serving) -> list[Snippet]:
    """Hydra's own code."""
    return [_shell(["python", "-m", "hydra.inference.cli", "--model", serving.draft])]


def _option(name: str, gpus: int) -> list[str]:
    return [name, f"{gpus}"] if gpus > 1 else []
