"""GGUF files for llama.cpp, written by the converter of the user's llama.cpp source tree.

The converter is a script of that tree with a gguf library of its own; it runs in a separate process of this Python.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from draftsmith.errors import UserError, last_line
from draftsmith.heads.formats.engines import GGUF_TYPES
from draftsmith.heads.formats.recognise import load_head
from draftsmith.progress import say
from draftsmith.stages import gguf_wrapper
from draftsmith.stages.exporting import export_options
from draftsmith.stages.session import Session
from draftsmith.storage import atomic_path
from draftsmith.target.gguf_file import is_gguf, model_folder, open_gguf

SCRIPT, LIBRARY = "convert_hf_to_gguf.py", "gguf-py"
LAYOUT, WHOLE = "eagle3_llama_cpp", "draft_model"
HEADS = {
    LAYOUT: "draft-eagle3",
    "dflash_llama_cpp": "draft-dflash",
    "dflash2_llama_cpp": "draft-dflash",
    "dspark_llama_cpp": "draft-dspark",
}
"""The layouts that can be converted: those of heads, with their names for llama-server's --spec-type (they need the
target's tokenizer), and WHOLE, that of whole models."""
PACKAGES = {"yaml": "PyYAML", "google": "protobuf"}
"""Modules that are installed under another name."""


def convert(
    tree: Path, model: Path, out: Path, outtype: str, *, target: Path | None = None, pre_tokenizer: str | None = None
) -> Path:
    """Write the model in the folder `model` as the GGUF file `out`, all or nothing, and return its path.

    tree: a llama.cpp source tree. outtype: what the converter's --outtype takes. target: for the export of a head, the
    folder of its target, whose configuration and tokenizer are read, not its weights. pre_tokenizer: llama.cpp's name of
    how text is split before BPE, where the converter does not recognise the tokenizer. Raises UserError where the tree
    cannot convert the model; the converter's output is then in `out` with ".log" added to its name.
    """
    check_tree(tree)
    log = out.with_name(f"{out.name}.log")
    arguments = [str(model), *([] if target is None else ["--target-model-dir", str(target)])]
    with atomic_path(out) as temporary:
        command = _command(tree, [*arguments, "--outfile", str(temporary), "--outtype", outtype], pre_tokenizer)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
        if done.returncode or not (temporary.exists() and temporary.stat().st_size):
            log.write_text(done.stdout, encoding="utf-8")
            raise UserError(f"{_reason(done.stdout, arguments[0], tree)}; the converter's output is in {log}.")
    log.unlink(missing_ok=True)
    return out


def check_tree(tree: Path) -> None:
    """Raise UserError where `tree` is no llama.cpp source tree that knows EAGLE-3."""
    script = tree / SCRIPT
    if not script.is_file() or not (tree / LIBRARY / "gguf").is_dir():
        raise UserError(
            f"{tree} is no llama.cpp source tree, as it lacks {LIBRARY if script.is_file() else SCRIPT}: clone "
            "https://github.com/ggml-org/llama.cpp and name that folder."
        )
    if "--target-model-dir" not in script.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"The llama.cpp in {tree} is too old to convert EAGLE-3 heads: update it (`git pull`).")


def check_conversion(session: Session, tree: Path) -> None:
    """Refuse, before any work, what cannot be converted."""
    check_tree(tree)
    method = load_head(session.head_folder, session.target).method
    if (layout := export_options(session.recipe, method)["layout"]) not in (*HEADS, WHOLE):
        own = f"{method}_llama_cpp"
        wanted = WHOLE if method == WHOLE else own if own in HEADS else ""
        remedy = f"add --export.layout {wanted}" if wanted else f"llama.cpp knows no {method} heads"
        raise UserError(
            f"--gguf converts the layouts {', '.join(HEADS)} and {WHOLE}, but the head would be exported as {layout}: "
            f"{remedy}."
        )


def export_gguf(
    session: Session, exported: Path, tree: Path, outtype: str | None = None, pre_tokenizer: str | None = None
) -> Path:
    """Convert the export in the folder `exported` to a GGUF file next to it; print the command that converts the target, or its file.

    outtype: None for the dtype of the export. The rest is as in `convert`.
    """
    dtype, path = session.recipe.export.dtype, session.target_path
    target = model_folder(path).absolute()
    if is_gguf(path):  # which names it
        pre_tokenizer = pre_tokenizer or open_gguf(path).header.metadata.get("tokenizer.ggml.pre")
    outtype = outtype or GGUF_TYPES[session.target.dtype_name if dtype == "auto" else dtype]
    if not target.is_dir():  # a Hub name, of which the configuration and the tokenizer are needed
        target = Path(snapshot_download(session.target_path, allow_patterns=["*.json", "*.jinja", "*.model", "*.txt"]))
    out = exported.with_name(f"{exported.name}.gguf")
    needs = None if exported.name == WHOLE else target
    convert(tree, exported, out, outtype, target=needs, pre_tokenizer=pre_tokenizer)
    arguments = [str(target), "--outfile", "target.gguf", "--outtype", GGUF_TYPES[session.target.dtype_name]]
    say(f"gguf: {out} ({outtype})")
    say(f"the target: {path if is_gguf(path) else shlex.join(_command(tree, arguments, pre_tokenizer))}")
    return out


def _command(tree: Path, arguments: Sequence[str], pre_tokenizer: str | None) -> list[str]:
    if pre_tokenizer is None:
        return [sys.executable, str(tree / SCRIPT), *arguments]
    return [sys.executable, str(gguf_wrapper.__file__), str(tree), pre_tokenizer, *arguments]


def _reason(output: str, model: str, tree: Path) -> str:
    """Return why the conversion failed, from what the converter printed."""
    last = last_line(output)
    if "pre-tokenizer was not recognized" in output:
        return (
            "llama.cpp's converter does not recognise how the target's tokenizer splits text: name llama.cpp's pre-tokenizer "
            "that does the same with --gguf-pre (gpt-2, llama-bpe, qwen2, ...)"
        )
    if "No module named '" in last:
        module = last.split("'")[1].split(".")[0]
        return (
            f"llama.cpp's converter needs a Python package: `pip install {PACKAGES.get(module, module)}` and try again"
        )
    return f"llama.cpp's converter in {tree} cannot convert {model}: {last}"
