"""The options of `draftsmith watch`, `verify` and `acceptance`, which read what engines tell."""

from pathlib import Path

from draftsmith.recipe.options import Option, number, text, whole_number

WATCH = (
    Option("--url URL", "Follow the counters of this server (vLLM, SGLang), http://HOST:PORT.", text),
    Option(
        "--records FILE", "Follow this file, which may grow: answers as JSON, a line each, or an engine's log.", Path
    ),
    Option(
        "--report FILE",
        "The result.json of an evaluation: its target must be the server's, its tau is held against the first requests'.",
        Path,
    ),
    Option("--drafter NAME", "That drafter of it; its first if left out.", text),
    Option("--model NAME", "What the server calls the target, where that is not the report's name of it.", text),
    Option("--tag KEY", "The key of an answer, or of its metadata, that names its slice.", text, "slice"),
    Option(
        "--baseline N",
        "The first requests (intervals, of counters) that later ones are held against; 1000 (250) and more until they suffice if left out.",
        whole_number("a number of requests, at least 100", 10**6),
    ),
    Option(
        "--per-day N",
        "How many answers, or lines of a log that tell acceptance, a day brings, for a file without times ('created').",
        number("a number above 0, at most 10^9", lambda value: 0 < value <= 1e9),
    ),
    Option(
        "--every SECONDS",
        "How often it looks; 15 if left out.",
        number("seconds, from 0.05 to 3600", lambda value: 0.05 <= value <= 3600),
        15.0,
    ),
    Option("--requests N", "End after so many requests.", whole_number("a number of requests, at least 1", 10**12)),
    Option("--once", "End at the end of the file."),
    Option("--go-on", "Go on after an alarm, with the slices that have none."),
    Option(
        "--state FILE",
        "What it knows, from which the same command goes on; watch.json if left out.",
        Path,
        Path("watch.json"),
    ),
    Option("--prometheus FILE", "Also write metrics there, a .prom file for the textfile collector.", Path),
    Option("--keep FOLDER", "Keep the worst requests there, redacted, for training; none is kept if left out.", Path),
    Option(
        "--keep-limit N",
        "How many of them; 100 if left out.",
        whole_number("a number of requests, at least 1", 10**5),
        100,
    ),
    Option(
        "--keep-days DAYS",
        "How long; 30 if left out.",
        number("days above 0, at most 3650", lambda value: 0 < value <= 3650),
        30.0,
    ),
    Option(
        "--redact MODULE:FUNCTION",
        "Also redact by this function of yours: it takes a text and returns one, or None to keep the request out.",
        text,
    ),
)
VERIFY = (
    Option("--url BASE", "The address of a running vLLM, llama-server or SGLang, such as http://localhost:8000.", text),
    Option("--model NAME", "How it calls the target, where that is not the target's own name.", text),
    Option("--engine NAME", "Start this one instead, in float32: vllm or llama.cpp.", text),
    Option("--home FOLDER", "Where that is installed: vLLM's environment, or a llama.cpp tree with build/bin.", Path),
    Option("--target FOLDER", "The files of the target that it serves; with --served those of the head's own.", Path),
    Option(
        "--served FOLDER", "Say instead what this target, quantized or tuned, loses of the head's acceptance.", Path
    ),
    Option(
        "--prompts FILE", "With --served: on the prompts of this file of conversations, not the bundle's few.", Path
    ),
    Option("--weights KIND", "With --served: the head's weights rounded to int8, int4, float8 or bfloat16, too.", text),
    Option("--gguf-pre NAME", "llama.cpp's name of the target's pre-tokenizer, where it does not recognise it.", text),
    Option("--output FILE", "Write the verdict, and what was seen, there as JSON.", Path),
)

ACCEPTANCE = (
    Option("--report FILE", "The result.json of an evaluation, whose tau stands beside.", Path),
    Option("--drafter NAME", "That drafter of it; its first if left out.", text),
)
