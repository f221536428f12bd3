"""The serving engines, one record each: how they split a draft over GPUs, and the lines that start them, ready to be pasted.

What an engine does with the files of one layout stands with the layout, in the method's formats.py, which names one of the
`start_...` functions here, and caveats at the end; in the records is what holds for all layouts.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.heads.formats.schema import ModelFiles, flatten
from draftsmith.target.gguf_file import is_gguf

GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
ADAPTER_NAME = "tuned"
"""What requests call the target with its adapter."""
_VLLM_BY_BATCH = ("eagle", "eagle3", "dflash")
"""The methods whose draft length vLLM changes with the batch."""
_SGLANG_BY_BATCH = ("EAGLE", "EAGLE3")
"""The algorithms whose draft length SGLang changes with the batch, in chains."""
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, and no others
_MEASURE = "compare tokens per second with and without the draft"
"""What to do where an engine counts nothing, or nobody knows where."""
_FEWER = "serve on fewer GPUs"
Split = Callable[[ModelFiles, int], Iterator[str]]
"""(files, number of GPUs) -> why the engine cannot split them so and what to do; the text follows the engine's name."""


def _divided(files: ModelFiles, gpus: int) -> Iterator[str]:
    """vLLM, SGLang and TensorRT-LLM build EAGLE drafts in the target's tensor-parallel group, and divide their layer: query heads
    and the feed-forward layer are divided, key/value heads divided or repeated. Medusa's blocks are never divided."""
    config = flatten(files.config)
    if "num_attention_heads" not in config:
        return
    heads, groups, width = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    if heads % gpus:
        yield f"divides its {heads} query heads: {_FEWER}, or train with a multiple of {gpus} in head.num_attention_heads"
    if groups % gpus and gpus % groups:
        yield (
            f"divides or repeats its {groups} key/value heads: {_FEWER}, or train with a divisor or a multiple of {gpus} in "
            "head.num_key_value_heads"
        )
    if width % gpus:
        yield (
            f"divides the {width} units of its feed-forward layer: {_FEWER}, or train with a multiple of {gpus} in "
            "head.intermediate_size"
        )


def _vllm(files: ModelFiles, gpus: int) -> Iterator[str]:
    """vLLM pads vocabularies to a multiple of 64 before it divides them, SGLang and TensorRT-LLM to whatever divides. Its
    `draft_tensor_parallel_size` changes nothing of that (0.32; issue 17499 of vllm-project/vllm)."""
    config = flatten(files.config)
    yield from _divided(files, gpus)
    for rows in sorted({config["vocab_size"], config.get("draft_vocab_size", config["vocab_size"])}):
        padded = -(-rows // 64) * 64
        if padded % gpus:
            yield f"pads its {rows} tokens to {padded} and divides them: {_FEWER}, 2, 4 or 8"


def _tgi(files: ModelFiles, gpus: int) -> Iterator[str]:
    """TGI divides Medusa's blocks where it computes them beside the target's projection."""
    H, projection = len(files.tensors["0.0.linear.weight"]), f"0.{files.config['medusa_num_layers']}.weight"
    if projection not in files.tensors and H % gpus:
        yield (
            f"divides the {H} units of its blocks: {_FEWER}, or train with head.original_lm_head false, whose blocks are "
            "repeated on every GPU"
        )


def one_gpu(_: ModelFiles, gpus: int) -> Iterator[str]:
    """The split of a program that runs on one GPU."""
    yield "knows no tensor parallelism: leave export.tensor_parallel at 1"


def _whole_layers(_: ModelFiles, gpus: int) -> Iterator[str]:
    """llama.cpp distributes whole layers, and a draft has one: `-devd` says which GPU takes it."""
    yield from ()


@dataclass(frozen=True)
class Engine:
    """A program that reads exports. No field has a default, so that a new engine says all of it.

    version: the one whose source or manual the layouts were checked against; which layouts it was also run with stands in
    served.json. counters: where it tells how many drafted tokens were accepted; `_MEASURE` where nobody knows. split: what keeps
    it from dividing a draft over GPUs, None for a program that serves nothing; `one_gpu` until its source was read.
    serves_adapters: whether it drafts for a target with a LoRA adapter, by its source. Where it does not, the README starts it
    without the draft.
    no_gguf: what keeps it from drafting for a target in a GGUF file, in words that follow its name; None where it does.
    """

    title: str
    version: str
    counters: str
    split: Split | None
    serves_adapters: bool
    no_gguf: str | None


_NO_GGUF = "reads no GGUF files"
_GROWS = "its command line shows the text as it grows, several tokens a step"
ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "vLLM",
        "0.32.0",
        "`vllm:spec_decode_num_drafts` and `vllm:spec_decode_num_accepted_tokens` under /metrics: 1 + accepted / drafts is "
        "tau",
        split=_vllm,
        serves_adapters=True,
        no_gguf="reads GGUF files with a plugin alone (vllm-gguf-plugin), and takes their format for the draft as well",
    ),
    "sglang": Engine(
        "SGLang",
        "0.5.23",
        "`accept len` in its log is tau",
        split=_divided,
        serves_adapters=False,
        no_gguf="keeps the embeddings of a GGUF file packed, which its drafts share, and takes its format for the draft as well",
    ),
    "tensorrt_llm": Engine(
        "TensorRT-LLM", "commit 00679c66c", _MEASURE, split=_divided, serves_adapters=False, no_gguf=_NO_GGUF
    ),
    "llama_cpp": Engine(
        "llama.cpp",
        "commit 0c1e57098",
        "`draft_n` and `draft_n_accepted` in the `timings` of every answer",
        split=_whole_layers,
        serves_adapters=False,
        no_gguf=None,
    ),
    "tgi": Engine("TGI", "commit 91560ed93", _MEASURE, split=_tgi, serves_adapters=False, no_gguf=_NO_GGUF),
    "medusa_original": Engine(
        "FasterDecoding/Medusa", "main", _GROWS, split=one_gpu, serves_adapters=False, no_gguf=_NO_GGUF
    ),
    "transformers": Engine("transformers", "5.23.0", _MEASURE, split=None, serves_adapters=False, no_gguf=None),
    "hydra_original": Engine("zankner/Hydra", "main", _GROWS, split=one_gpu, serves_adapters=False, no_gguf=_NO_GGUF),
    "speculators": Engine(
        "speculators",
        "0.9.0",
        "it serves nothing: it trains and evaluates further",
        split=None,
        serves_adapters=False,
        no_gguf=_NO_GGUF,
    ),
}
_RECORD = Path(__file__).with_name("served.json")
SERVED: dict[str, dict[str, dict[str, bool]]] = json.loads(_RECORD.read_text(encoding="utf-8"))
"""engine -> version -> layout: whether heads drafted in it as here. Written by scripts/bench/engines/page.py."""


def split_obstacle(engine: str, files: ModelFiles, gpus: int) -> str | None:
    """Return why `engine` cannot split these files over that many GPUs and what to do instead, None where it can.

    The text follows the engine's name. Programs that serve nothing split nothing.
    """
    split = ENGINES[engine].split
    return None if gpus == 1 or split is None else next(split(files, gpus), None)


@dataclass(frozen=True)
class Adapter:
    """What makes the target the one that the heads draft for. folder: of the adapter; rank: of its matrices."""

    folder: str
    rank: int


@dataclass(frozen=True)
class Again:
    """How an export is made again. folder: where its command was given; words: those that name the recipe and override it."""

    folder: str = ""
    words: tuple[str, ...] = ("--recipe", "recipe.yaml")


@dataclass(frozen=True)
class Serving:
    """What is served. draft: the export's folder; target: a folder or a Hub name; tokens: to draft per pass.

    dtype: of the export. layer_ids: the layers of the target that the head reads. heads: of Medusa. adapter: the target's,
    where the heads draft for the target with that. by_batch: (first batch, last batch, tokens to draft there, 0 for none), for
    engines that take a table; empty where nothing was planned. files: the folder of files beside the lines, empty for the one
    that they are typed in. again: how the export is made again. context: the most tokens that the target may be read with where its configuration
    names more, 0 where it does not: beyond it LongRoPE has other frequencies, engines take them by the length that they are
    started with, and the head was trained with those of shorter texts. rendered: what the chat template was given besides messages, as JSON, and its
    file where that is not the target's own; empty for none.
    """

    draft: str
    target: str
    tokens: int
    dtype: str = "bfloat16"
    gpus: int = 1
    layer_ids: tuple[int, ...] = ()
    heads: int = 0
    adapter: Adapter | None = None
    by_batch: tuple[tuple[int, int, int], ...] = ()
    files: str = ""
    again: Again = Again()
    context: int = 0
    rendered: tuple[str, str] = ("", "")


def steps_in_words(by_batch: Sequence[tuple[int, int, int]]) -> str:
    """Return the draft lengths of `Serving.by_batch` in words."""
    return ", ".join(
        f"{tokens or 'none'} at batch {first}" + ("" if first == last else f" to {last}")
        for first, last, tokens in by_batch
    )


@dataclass(frozen=True)
class Snippet:
    """Text to paste: for a shell (bash), or as the file `file` (yaml, python)."""

    language: str
    text: str
    file: str = ""


Start = Callable[[Serving], list[Snippet]]


def shell(*lines: list[str]) -> Snippet:
    """Return lines of words, one command; all but the first indented."""
    return Snippet("bash", " \\\n    ".join(shlex.join(line) for line in lines) + "\n")


def _on(name: str, gpus: int) -> list[str]:
    """The option of that name, for several GPUs."""
    return [name, f"{gpus}"] if gpus > 1 else []


def as_learned(serving: Serving, length: str, template: str = "", file: str = "") -> list[str]:
    """The options of these names by which texts are those that the head learned: a target's context that is shorter than it says, and what
    prompts are rendered by. Engines without an option for the latter take it with each request."""
    values = (length, serving.context), (template, serving.rendered[0]), (file, serving.rendered[1])
    return [word for name, value in values if name and value for word in (name, f"{value}")]


_VLLM_OPTIONS = "--max-model-len", "--default-chat-template-kwargs", "--chat-template"


def start_vllm(method: str, *, one_length: bool = False, native: bool = False, **more: bool) -> Start:
    """vLLM with the method of that name; more: further keys of its configuration. one_length: the draft's is not changed with the
    batch. native: the export is the target's directory, and holds the draft."""

    def lines(serving: Serving) -> list[Snippet]:
        config = {"method": method, "model": serving.draft, "num_speculative_tokens": serving.tokens, **more}
        if len(serving.by_batch) > 1 and method in _VLLM_BY_BATCH and not one_length:
            config["num_speculative_tokens_per_batch_size"] = [list(step) for step in serving.by_batch]
        target = str(config.pop("model")) if native else serving.target
        words = [
            "vllm",
            "serve",
            target,
            *_on("--tensor-parallel-size", serving.gpus),
            *as_learned(serving, *_VLLM_OPTIONS),
        ]
        speculative, adapter = ["--speculative-config", json.dumps(config)], serving.adapter
        if adapter is None:
            return [shell([*words, *speculative])]
        room = next((rank for rank in _VLLM_RANKS if rank >= adapter.rank), adapter.rank)
        loaded = ["--enable-lora", "--max-lora-rank", f"{room}", "--lora-modules", f"{ADAPTER_NAME}={adapter.folder}"]
        return [shell(words, loaded, speculative)]

    return lines


def start_vllm_speculators(serving: Serving) -> list[Snippet]:
    """vLLM started on the draft, which names the target."""
    gpus = _on("--tensor-parallel-size", serving.gpus)
    return [shell(["vllm", "serve", serving.draft, *gpus, *as_learned(serving, *_VLLM_OPTIONS)])]


def start_speculators(serving: Serving) -> list[Snippet]:
    """The speculators package."""
    read = f"SpeculatorModel.from_pretrained({serving.draft!r})"
    return [shell(["python", "-c", f"from speculators import SpeculatorModel; {read}"])]


def start_sglang(algorithm: str, *, native: bool = False) -> Start:
    """SGLang with the algorithm of that name. DFLASH sets steps and top-k itself. native: see `start_vllm`."""

    def lines(serving: Serving) -> list[Snippet]:
        K, model = serving.tokens, serving.draft if native else serving.target
        learned = as_learned(serving, "--context-length", file="--chat-template")
        server = ["python", "-m", "sglang.launch_server", "--model-path", model, *learned]
        chain = [] if algorithm == "DFLASH" else ["--speculative-num-steps", f"{K}", "--speculative-eagle-topk", "1"]
        words = (
            [*server, "--speculative-algorithm", algorithm, *_on("--tp-size", serving.gpus)],
            *([] if native else [["--speculative-draft-model-path", serving.draft]]),
            [*chain, "--speculative-num-draft-tokens", f"{K + 1}"],
        )
        if len(serving.by_batch) < 2 or algorithm not in _SGLANG_BY_BATCH:
            return [shell(*words)]
        # By the smallest batch of each step; the start's own length must be a candidate.
        steps = {f"{first}": {"candidate_steps": [k]} for first, _, k in serving.by_batch}
        path = os.path.join(serving.files, "adaptive.json")
        adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", path]
        return [Snippet("json", json.dumps(steps, indent=2) + "\n", "adaptive.json"), shell(*words, adaptive)]

    return lines


def start_tensorrt_llm(decoding_type: str) -> Start:
    """TensorRT-LLM with drafts of that type; one that reads layers of the target is told which."""

    def lines(serving: Serving) -> list[Snippet]:
        layers = ", ".join(str(k - 1) for k in serving.layer_ids)  # it counts what leaves a layer
        text = (
            "speculative_config:\n"
            f"  decoding_type: {decoding_type}\n"
            f"  max_draft_len: {serving.tokens}\n"
            f"  speculative_model: {json.dumps(serving.draft)}\n"
        ) + (f"  eagle3_layers_to_capture: [{layers}]\n" if layers else "")
        words = ["trtllm-serve", serving.target, "--extra_llm_api_options", os.path.join(serving.files, "trtllm.yaml")]
        words += [*_on("--tp_size", serving.gpus), *as_learned(serving, "--max_seq_len")]
        return [Snippet("yaml", text, "trtllm.yaml"), shell(words)]

    return lines


def start_tensorrt_llm_medusa(serving: Serving) -> list[Snippet]:
    """TensorRT-LLM with Medusa heads, which its converter builds in."""
    return [
        shell(
            ["python", "examples/medusa/convert_checkpoint.py", "--model_dir", serving.target],
            ["--medusa_model_dir", serving.draft, "--num_medusa_heads", f"{serving.heads}"],
            ["--dtype", serving.dtype, "--output_dir", "checkpoint", *_on("--tp_size", serving.gpus)],
        )
    ]


def start_transformers(serving: Serving) -> list[Snippet]:
    """transformers' assisted generation."""
    model, file = serving.target.rsplit("/", 1) if is_gguf(serving.target) else (serving.target, None)
    gguf = f", gguf_file={json.dumps(file)}" if file else ""
    text = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"target = {json.dumps(model)}\n"
        f"tokenizer = AutoTokenizer.from_pretrained(target{gguf})\n"
        f"model = AutoModelForCausalLM.from_pretrained(target{gguf})\n"
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
    return [shell([*words, *_on("--num-shard", serving.gpus)])]


def start_original(package: str) -> Start:
    """The command line that a method was published with, in the package of that name."""
    return lambda serving: [shell(["python", "-m", f"{package}.inference.cli", "--model", serving.draft])]


# Caveats that several layouts share.
VLLM_SAME_GPUS = "vLLM 0.32 runs these drafts on as many GPUs as the target: `draft_tensor_parallel_size` is accepted, and changes nothing."
SGLANG_ROOT = "The root counts: a chain of K tokens is K steps, top-k 1 and K + 1 draft tokens."
SPECULATORS_NUMBERS = (
    "The export names the target and the number of tokens; other numbers need another export, or the flat layout."
)
SPECULATORS_COMPLETE = "The package knows `layers.0.` and needs the embeddings; both are there."


def name_the_method(method: str) -> str:
    """Return the caveat on how vLLM guesses a method that is not named."""
    return (
        "Name the method. Without `method`, vLLM guesses it from the path of the draft: one that holds `eagle-` anywhere is "
        "taken for EAGLE-1, otherwise one that holds `eagle3` for EAGLE-3, and any other for a language model of its own. With "
        f'`"method": "{method}"` the path does not matter.'
    )


RESERVED_PATH_WORDS = re.compile("eagle-|eagle3|dflash|dspark")
"""Names in a draft's path that vLLM takes for a method, even beside another method."""


def path_decides(method: str) -> str:
    """Return the caveat on methods of vLLM that those words override."""
    return (
        f'`"method": "{method}"` does not settle the method alone: a path of the draft that holds `eagle-`, `eagle3`, `dflash` or '
        "`dspark` wins, so move the folder where there is such a name in its path."
    )
