"""Conversion for llama.cpp: what the converter is given, what becomes of its mistakes, and one run of a real one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.export.export import export_head
from draftsmith.stages.gguf import SCRIPT, check_tree, convert
from draftsmith.target.gguf_file import model_folder
from draftsmith.target.target import load_target
from tests.exports import make_eagle3, make_medusa
from tests.ggufs import tiny_llama, write_gguf
from tests.helpers import save_target

pytestmark = pytest.mark.full

TREE = "DRAFTSMITH_LLAMA_CPP"
WRITES = "Path(out).write_text(json.dumps({'argv': sys.argv, 'library': gguf.TREE, 'pre': TextModel().get_vocab_base_pre(0)}))"
MODEL = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        return "recognised"
"""
CONVERTER = """
import json, sys
from pathlib import Path
sys.path.insert(1, str(Path(__file__).parent / "gguf-py"))
import gguf
{model}

def main():
    assert "--target-model-dir" in sys.argv or len(sys.argv) == 6
    out = sys.argv[sys.argv.index("--outfile") + 1]
    print("INFO:hf-to-gguf:Loading model")
    {body}

if __name__ == "__main__":
    main()
"""
MakeTree = Callable[..., Path]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    """Build a source tree whose converter runs `body`; split: the model classes are in a package, as today."""

    def make(body: str = WRITES, split: bool = True) -> Path:
        tree = tmp_path / "llama.cpp"
        (tree / "gguf-py" / "gguf").mkdir(parents=True, exist_ok=True)
        (tree / "gguf-py" / "gguf" / "__init__.py").write_text("TREE = 'from the tree'\n")
        (tree / "conversion").mkdir(exist_ok=True)
        (tree / "conversion" / "__init__.py").write_text("from .base import TextModel\n")
        # As the real one, the package needs the tree's library.
        (tree / "conversion" / "base.py").write_text("import gguf\n" + MODEL)
        model = "import conversion\nfrom conversion.base import TextModel as Base" if split else MODEL
        body = body.replace("TextModel()", "Base()") if split else body
        (tree / SCRIPT).write_text(CONVERTER.format(model=model, body=body))
        return tree

    return make


def raises(make: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("pre", [None, "qwen2"])
def test_the_converter_gets_its_arguments(make_tree: MakeTree, tmp_path: Path, split: bool, pre: str | None) -> None:
    tree, out = make_tree(split=split), tmp_path / "out" / "draft.gguf"
    assert convert(tree, Path("the draft"), out, "q8_0", target=Path("target"), pre_tokenizer=pre) == out
    found = json.loads(out.read_text())
    arguments = found["argv"][1:]
    temporary = arguments.pop(arguments.index("--outfile") + 1)
    assert arguments == ["the draft", "--target-model-dir", "target", "--outfile", "--outtype", "q8_0"]
    assert Path(temporary).parent == out.parent
    assert Path(temporary) != out, "a reader never sees half of it"
    assert found["library"] == "from the tree"
    assert found["pre"] == (pre or "recognised")
    assert [path.name for path in out.parent.iterdir()] == ["draft.gguf"]

    convert(tree, Path("target"), out, "f32", pre_tokenizer=pre)
    assert json.loads(out.read_text())["argv"][1:2] == ["target"]
    assert "--target-model-dir" not in json.loads(out.read_text())["argv"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise ValueError('EAGLE-3 d2t contains duplicate ids.')",
            "cannot convert head: ValueError: EAGLE-3 d2t contains",
        ),
        ("import sentencepiece_of_nobody.inner", "`pip install sentencepiece_of_nobody` and try again"),
        ("raise ModuleNotFoundError(\"No module named 'google.protobuf'\")", "`pip install protobuf`"),
        ("raise NotImplementedError('BPE pre-tokenizer was not recognized - update')", "with --gguf-pre (gpt-2, "),
        ("Path(out).write_text('half'); sys.exit(1)", "INFO:hf-to-gguf:Loading model"),
        ("pass", "INFO:hf-to-gguf:Loading model"),
    ],
)
def test_a_failure_is_one_sentence_and_keeps_the_file_before(
    make_tree: MakeTree, tmp_path: Path, body: str, message: str
) -> None:
    out = tmp_path / "out" / "draft.gguf"
    out.parent.mkdir()
    out.write_text("before")
    found = raises(lambda: convert(make_tree(body), Path("head"), out, "f32", target=Path("target")))
    assert message in found
    log = out.with_name("draft.gguf.log")
    assert str(log) in found
    assert "Loading model" in log.read_text()
    assert out.read_text() == "before"
    assert {path.name for path in out.parent.iterdir()} == {"draft.gguf", "draft.gguf.log"}

    convert(make_tree(), Path("head"), out, "f32", target=Path("target"))
    assert not log.exists(), "the log of a failure goes with it"


def test_trees_that_are_none(make_tree: MakeTree, tmp_path: Path) -> None:
    tree = make_tree()
    check_tree(tree)
    assert f"lacks {SCRIPT}" in raises(lambda: check_tree(tmp_path / "nowhere"))
    (tree / SCRIPT).write_text("print('an old one')")
    assert "too old to convert EAGLE-3" in raises(lambda: check_tree(tree))
    (tree / "gguf-py" / "gguf").rename(tree / "elsewhere")
    assert "lacks gguf-py" in raises(lambda: check_tree(tree))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gguf-pre", "qwen2"], "--gguf-pre is for conversion: name a llama.cpp source tree with --gguf."),
        (["--gguf-type", "f32"], "--gguf-type is for conversion: name a llama.cpp source tree with --gguf."),
        (["--gguf", "tree", "--gguf-type", "q4_k"], "then run llama-quantize."),
    ],
)
def test_options_that_cannot_be(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--recipe", "r.yaml", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target/ and head/."""
    folder = tmp_path_factory.mktemp("trained")
    save_target(folder / "target")
    target = load_target(str(folder / "target"))
    save_head(make_eagle3(target, None), folder / "head", target)
    return folder


def test_a_head_of_another_method_that_llama_cpp_does_not_know(
    make_tree: MakeTree, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(str(trained / "target"))
    save_head(make_medusa(target), trained / "medusa", target)
    words = ["export", "--target.path", str(trained / "target"), "--head", str(trained / "medusa"), "--head.layer_ids"]
    words += ["[1,3,5]", "--export.layout", "eagle3_llama_cpp", "--output_dir", str(tmp_path / "run")]
    assert main([*words, "--gguf", str(make_tree())]) == 2
    assert "the head would be exported as medusa: llama.cpp knows no medusa heads." in capsys.readouterr().err
    assert not (tmp_path / "run" / "export").exists()


def test_export_with_gguf(
    make_tree: MakeTree, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, run = make_tree(), tmp_path / "run"
    words = ["export", "--target.path", str(trained / "target"), "--target.device", "cpu"]
    words += ["--head.layer_ids", "[1,3,5]"]
    words += ["--head", str(trained / "head"), "--output_dir", str(run), "--gguf", str(tree)]
    for wrong, message in (
        ([], "the head would be exported as eagle3: add --export.layout eagle3_llama_cpp"),
        (["--export.layout", "eagle3"], "the head would be exported as eagle3: add"),
        (["--export.layout", "eagle3_llama_cpp", "--gguf", str(tmp_path / "none")], "none is no llama.cpp source tree"),
    ):
        assert main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err
        assert not (run / "export").exists()

    words += ["--export.layout", "eagle3_llama_cpp", "--export.dtype", "bfloat16"]
    assert main(words) == 0
    said, out = capsys.readouterr(), run / "export" / "eagle3_llama_cpp.gguf"
    assert said.out.strip() == str(out)
    found = json.loads(out.read_text())["argv"][1:]
    assert found[:3] == [str(out.with_suffix("")), "--target-model-dir", str(trained / "target")]
    assert found[-2:] == ["--outtype", "bf16"], "the dtype of the export"
    command = next(line for line in said.err.splitlines() if line.startswith("the target: "))
    assert f"{tree / SCRIPT} {trained / 'target'} --outfile target.gguf --outtype f32" in command

    assert main([*words, "--gguf-type", "q8_0"]) == 0
    assert json.loads(out.read_text())["argv"][-1] == "q8_0", "made again next to the export that is reused"
    make_tree("raise ValueError('no')")
    assert main(words) == 2
    assert "cannot convert" in capsys.readouterr().err
    assert (out.with_suffix("") / "config.json").exists(), "the export itself is kept"


@pytest.mark.engine
def test_a_real_tree(trained: Path, tmp_path: Path) -> None:
    if TREE not in os.environ:
        pytest.skip(f"{TREE} names no llama.cpp source tree")
    tree, folder, out = Path(os.environ[TREE]), trained / "target", tmp_path / "draft.gguf"
    target = load_target(str(folder))
    draft = export_head(make_eagle3(target, None), target, tmp_path / "draft", layout="eagle3_llama_cpp")
    assert "--gguf-pre" in raises(lambda: convert(tree, draft, out, "f32", target=folder))
    convert(tree, draft, out, "f32", target=folder, pre_tokenizer="llama-bpe")
    convert(tree, folder, tmp_path / "target.gguf", "f32", pre_tokenizer="llama-bpe")
    for path, kind in ((out, "eagle3"), (tmp_path / "target.gguf", "llama")):
        assert path.read_bytes()[:4] == b"GGUF"
        code = f"import gguf; print(gguf.GGUFReader({str(path)!r}).get_field('general.architecture').contents())"
        env = os.environ | {"PYTHONPATH": str(tree / "gguf-py")}
        read = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert read.stdout.strip() == kind


def test_the_target_is_a_gguf_file(
    make_tree: MakeTree, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    write_gguf(file := tmp_path / "tiny.gguf", tiny_llama(layers=8))
    target = load_target(str(file))
    save_head(make_eagle3(target, None), tmp_path / "head", target)
    words = ["--target.path", str(file), "--target.device", "cpu", "--head.layer_ids", "[1,3,5]"]
    words += ["--head", str(tmp_path / "head"), "--output_dir", str(tmp_path / "run")]
    words += ["--gguf", str(make_tree())]  # the layout is llama.cpp's where none is named
    assert main(["export", *words]) == 0
    said, found = capsys.readouterr(), json.loads((tmp_path / "run/export/eagle3_llama_cpp.gguf").read_text())
    assert f"the target: {file}" in said.err.splitlines()
    assert found["argv"][2:4] == ["--target-model-dir", str(model_folder(str(file)))]
    assert found["pre"] == "llama-bpe", "as the file says"
