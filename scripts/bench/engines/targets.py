"""Ask engines for which classes of targets they draft, and write heads/formats/targets.json.

    python -m scripts.bench.engines.targets --vllm HOME --llama-cpp HOME --sglang FOLDER
    python -m scripts.bench.engines.targets --vllm HOME --check      # compare alone: 1 where the list is another

--vllm, --llama-cpp: the folders that scripts/test_engines.sh makes. --sglang: what `pip download --no-deps sglang` and unzip leave;
it is read, not run, as it needs a GPU. An engine that is not named keeps its list, as TensorRT-LLM does, which was read by hand.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.heads.formats.engines import ENGINES
from draftsmith.heads.formats.layout import TARGETS, TARGETS_FILE

Answer = dict[str, Any]

# Runs in vLLM's own environment. Of a class that does not load there (for want of torchvision) the sources are read; drafts are no
# targets.
_ASK_VLLM = """
import contextlib, importlib.metadata, json, sys
with contextlib.redirect_stdout(sys.stderr):
    import vllm
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.interfaces_base import is_text_generation_model
    found, unloaded = {}, {}
    for name, model in registry.ModelRegistry.models.items():
        if name in registry._SPECULATIVE_DECODING_MODELS:
            continue
        try:
            kind = model.load_model_cls()
        except Exception:
            unloaded[name] = model.class_name
            continue
        if is_text_generation_model(kind):
            found[name] = bool(supports_eagle3(kind))
version = importlib.metadata.version(importlib.metadata.packages_distributions()["vllm"][0])
print(json.dumps({"version": version, "found": found, "unloaded": unloaded, "package": vllm.__path__[0]}))
"""


def ask_vllm(home: Path) -> Answer:
    """Return what an installed vLLM says of every class of its registry."""
    done = subprocess.run([home / "bin" / "python", "-c", _ASK_VLLM], stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    sources = _Sources(Path(said["package"]) / folder for folder in ("model_executor/models", "models"))
    unloaded = {name: sources.has(kind, "SupportsEagle3") for name, kind in said["unloaded"].items()}
    how = "`supports_eagle3` of every class in the registry of an installed one; for mtp by hand: vllm/config/speculative.py"
    states = _split(said["found"] | unloaded)
    return {"version": said["version"], "asked": how, "mtp": TARGETS["vllm"]["mtp"], "states": states}


class _Sources:
    """The classes of Python files, by name, and what a file sets at its top level.

    What is imported under another name is not followed.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.classes: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
        self.entries: list[tuple[Path, str]] = []
        for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, []).append((file, node))
                elif isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["EntryClass"]:
                    self.entries += [(file, one.id) for one in ast.walk(node.value) if isinstance(one, ast.Name)]

    def has(self, name: str, wanted: str, file: Path | None = None) -> bool:
        """Whether a class, of this file if there are several, has a method or a base of the name `wanted`, itself or from others."""
        for place, node in sorted(self.classes.get(name, []), key=lambda one: one[0] != file)[:1]:
            bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            if wanted in (*bases, *methods) or any(self.has(base, wanted, place) for base in bases):
                return True
        return False


def read_sglang(folder: Path) -> Answer:
    """Return what the sources of SGLang say: the classes that have, or inherit, the methods that its drafts call."""
    sources = _Sources([folder / "sglang" / "srt" / "models"])

    def answers(*methods: str) -> Answer:
        targets = [(file, name) for file, name in sources.entries if not _is_a_draft(name)]
        return _split({name: all(sources.has(name, method, file) for method in methods) for file, name in targets})

    version = re.search(r"^Version: (.+)$", next(folder.glob("sglang-*.dist-info/METADATA")).read_text(), re.MULTILINE)
    assert version is not None
    layers, blocks, ends = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture", "get_embed_and_head"
    how = (
        f"the classes with the method `{ends}`, and for states `{layers}` too; for blocks with `{blocks}`; in the sources; for mtp by hand: "
        "srt/arg_groups/speculative_hook.py"
    )
    answered = {"states": answers(layers, ends), "ends": answers(ends), "blocks": answers(blocks)}
    answered["mtp"] = TARGETS["sglang"]["mtp"]
    return {"version": version[1], "asked": how, **answered}


def _is_a_draft(name: str) -> bool:
    return re.search(r"Eagle|MTP|NextN|DFlash|DSpark|Draft|Assistant", name, re.IGNORECASE) is not None


def read_llama_cpp(home: Path) -> Answer:
    """Return what the sources of llama.cpp say: the architectures whose graph keeps what enters its layers, by the names that
    the converter takes for them."""
    source = home / "llama.cpp"
    graphs = {
        name: text
        for file in (source / "src" / "models").glob("*.cpp")
        for text in [file.read_text(encoding="utf-8")]
        for name in re.findall(r"llama_model_(\w+)::build_arch_graph", text)
    }
    header = (source / "src" / "models" / "models.h").read_text(encoding="utf-8")
    parts = re.split(r"^struct llama_model_(\w+)", header, flags=re.MULTILINE)
    borrowed = {
        name: found[1]
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
        if (found := re.search(r"using graph = llama_model_(\w+)::graph", text))
    }

    def keeps(model: str) -> bool:
        return "t_layer_inp[" in graphs.get(model, "") or (model in borrowed and keeps(borrowed[model]))

    def names(file: str, entry: str) -> dict[str, str]:
        return dict(re.findall(entry, (source / file).read_text(encoding="utf-8")))

    made = names("src/llama-model.cpp", r"case LLM_ARCH_(\w+):\s*return new llama_model_(\w+)\(")
    written = names("src/llama-arch.cpp", r"\{\s*LLM_ARCH_(\w+),\s*\"([\w-]+)\"")
    models = {written[arch]: model for arch, model in made.items()}
    called = names("gguf-py/gguf/constants.py", r"MODEL_ARCH\.(\w+):\s*\"([\w-]+)\"")
    converted = _converted(source / "conversion")
    kept = {name: (model := models.get(called[arch])) is not None and keeps(model) for name, arch in converted.items()}
    how = "the graphs that set `t_layer_inp`, by the classes that its converter takes for them, in the sources"
    # Which do not say their commit; a class that it does not convert, it does not serve.
    return {"version": ENGINES["llama_cpp"].version, "asked": how, "states": _split(kept) | {"others": False}}


def _converted(folder: Path) -> dict[str, str]:
    """Return the architecture of llama.cpp that each class of transformers is converted to."""
    classes: dict[str, ast.ClassDef] = {}
    for file in sorted(folder.glob("*.py")):
        classes |= {n.name: n for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)}

    def arch(name: str) -> str | None:
        node = classes.get(name)
        if node is None:
            return None
        for one in node.body:
            if isinstance(one, (ast.Assign, ast.AnnAssign)) and "model_arch" in ast.unparse(one).split("=")[0]:
                return ast.unparse(one).rpartition(".")[2] if one.value is not None else None
        return next((found for base in node.bases if (found := arch(ast.unparse(base).split(".")[-1]))), None)

    found: dict[str, str] = {}
    for name, node in classes.items():
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "ModelBase.register":
                kind = arch(name)
                if kind is not None and kind not in ("MMPROJ", "EAGLE3", "DFLASH"):
                    found |= {ast.literal_eval(a): kind for a in call.args if not _is_a_draft(ast.literal_eval(a))}
    return found


def _split(found: Mapping[str, bool]) -> Answer:
    """Return the architectures that may be served and those that are not, sorted; of others nothing is known."""
    yes, no = (sorted(name for name, good in found.items() if good is wanted) for wanted in (True, False))
    return {"yes": yes, "no": no, "others": None}


ASKING = {"vllm": ask_vllm, "llama_cpp": read_llama_cpp, "sglang": read_sglang}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the lists of the engines that are named; with --check compare them, and return 1 where one is another."""
    parser = argparse.ArgumentParser(prog="targets", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for engine in ASKING:
        parser.add_argument(f"--{engine.replace('_', '-')}", dest=engine, type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true", help="write nothing")
    own = parser.parse_args(argv)
    found = {engine: ask(place) for engine, ask in ASKING.items() if (place := getattr(own, engine)) is not None}
    if not found:
        parser.error("name an engine to ask")
    changed = [engine for engine, answer in found.items() if answer != TARGETS.get(engine)]
    for engine, answer in found.items():
        for need in answer.keys() - {"version", "asked"}:
            known = TARGETS.get(engine, {}).get(need, {"yes": [], "no": []})
            print(engine, answer["version"], need, f"{len(answer[need]['yes'])} yes, {len(answer[need]['no'])} no")
            print(
                "\n".join(
                    f"  now {said}: {name}"
                    for said in ("yes", "no")
                    for name in sorted({*answer[need][said]} - {*known[said]})
                )
            )
    if own.check:
        return bool(changed)
    TARGETS_FILE.write_text(json.dumps(TARGETS | found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
