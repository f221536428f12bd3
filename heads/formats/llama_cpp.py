"""llama.cpp, whose converter makes GGUF files of target and draft before its server starts: the lines for that, and what it computes otherwise."""

import math
import os
import shlex
from pathlib import Path

from draftsmith.heads.base import DraftHead
from draftsmith.heads.formats.engines import GGUF_TYPES, Serving, Snippet, Start, as_learned, shell
from draftsmith.heads.formats.layout import Rule
from draftsmith.heads.formats.schema import ModelFiles
from draftsmith.target.gguf_file import is_gguf
from draftsmith.target.target import Target

LLAMA_CPP_SILENT = "Without `--spec-type` it does not speculate, and says nothing."


def start_llama_cpp(spec_type: str, *, whole: bool = False) -> Start:
    """llama.cpp with the `--spec-type` of that name. whole: the draft is a model of its own, with a tokenizer."""

    def lines(serving: Serving) -> list[Snippet]:
        def converted(folder: str, file: str, *more: str) -> list[str]:
            return [
                "python",
                "convert_hf_to_gguf.py",
                folder,
                *more,
                "--outfile",
                file,
                "--outtype",
                GGUF_TYPES[serving.dtype],
            ]

        target, draft, folder = (os.path.join(serving.files, name) for name in ("target.gguf", "draft.gguf", "target"))
        commands, within = [["hf", "download", serving.target, "--local-dir", folder]], ""
        if os.path.isabs(serving.target):  # the converter takes no name of the Hub
            folder, commands = serving.target, []
        tokenizer = [] if whole else ["--target-model-dir", folder]
        commands += [converted(folder, target), converted(serving.draft, draft, *tokenizer)]
        if is_gguf(serving.target):
            target, commands = serving.target, commands[-1:]
            if not whole:  # which takes the tokenizer out of the target's file
                path, again = Path(serving.draft), serving.again
                draft, within = f"{path}.gguf", again.folder
                commands = [["draftsmith", "export", *again.words, "--export.layout", path.name, "--gguf", "llama.cpp"]]
        learned = as_learned(serving, "-c", "--chat-template-kwargs", "--chat-template-file")
        server = ["llama-server", "-m", target, "-md", draft, "--spec-type", spec_type, *learned]
        texts = [shell(words).text for words in (*commands, [*server, "--spec-draft-n-max", f"{serving.tokens}"])]
        texts[0] = f"(cd {shlex.quote(within)} && {texts[0].rstrip()})\n" if within else texts[0]
        # Where one fails the server would take a file of another draft.
        return [Snippet("bash", " &&\n".join(text.rstrip("\n") for text in texts) + "\n")]

    return lines


def llama_cpp_yarn(title: str, instead: str) -> Rule:
    """Return the rule on YaRN that llama.cpp computes otherwise than transformers. title: of the heads. instead: what to do."""
    what = f"a target with YaRN that is not truncated, or has a scale of its own, for {title}"
    return Rule(what, "rounds where it ends and scales by its factor alone, in silence", instead, _other_yarn)


def _other_yarn(files: ModelFiles, target: Target, head: DraftHead) -> bool:
    rope = head.config.rope_parameters
    if rope["rope_type"] != "yarn":
        return False
    factor, scales = rope.get("factor") or 1.0, (rope.get("mscale"), rope.get("mscale_all_dim"))

    def scale(by: float) -> float:
        return 1 + 0.1 * by * math.log(max(factor, 1.0))

    own = scale(scales[0]) / scale(scales[1]) if all(scales) else scale(1)
    return rope.get("truncate") is False or not math.isclose(
        rope.get("attention_factor") or own, scale(1), rel_tol=1e-3
    )
