"""The public API: docs/api.md names it whole, its example runs, and importing it costs nothing."""

import ast
import copy
import inspect
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import draftsmith
from draftsmith import Request, Sampling, UserError
from draftsmith.decoder.answers import Generation
from draftsmith.decoder.decode import decode_batch
from draftsmith.eval.drafters.system import head_system
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.eagle3 import Eagle3Options
from draftsmith.heads.eagle3.head import build
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import build as build_medusa
from scripts.bench.pages import reference
from tests.helpers import save_target

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that the page names: a target and an untrained head for it."""
    folder = tmp_path_factory.mktemp("api")
    save_target(folder / "models/my-model", initializer_range=0.08)
    target = draftsmith.load_target(folder / "models/my-model")
    torch.manual_seed(0)
    head = build(Eagle3Options(layer_ids=[2, 4, 5]), target, None)
    save_head(head, folder / "runs/eagle3-my-model/train/best", target)
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


@pytest.fixture(scope="module")
def loaded(place: Path) -> tuple[draftsmith.Target, draftsmith.DraftHead]:
    target = draftsmith.load_target(place / "models/my-model", dtype="bfloat16")
    return target, draftsmith.load_head(place / "runs/eagle3-my-model/train/best", target)


def test_the_example_of_the_page_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), "docs/api.md", "exec"), {})
    told = capsys.readouterr().out
    assert " passes for 32 tokens: " in told
    assert "is a draft head: give the folder of the model that it drafts for" in told
    assert "eagle3 0.0002 " in told


def test_the_page_names_what_can_be_imported_and_nothing_else() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    named = {re.match(r"\w+", code)[0] for row in rows for code in re.findall(r"`([^`]+)`", row)}
    assert named | {"DraftHead", "Target", "Tally", "Recipe"} == set(draftsmith.__all__)
    assert all(f"`{name}`" in PAGE for name in ("DraftHead", "Target", "Tally", "Recipe"))
    for name in draftsmith.__all__:
        assert getattr(draftsmith, name).__doc__, name
    assert set(draftsmith.__all__) <= set(dir(draftsmith))
    with pytest.raises(AttributeError, match="no attribute 'load_heads'"):
        draftsmith.load_heads  # noqa: B018


def test_the_page_shows_the_docstrings_which_tell_every_argument() -> None:
    assert f"<!-- reference -->\n{reference()}<!-- end -->" in PAGE, "run python -m scripts.bench.pages"
    functions = [one for name in draftsmith.__all__ if inspect.isfunction(one := getattr(draftsmith, name))]
    assert len(functions) == 8
    for function in functions:
        told, _, raised = (function.__doc__ or "").partition("    Raises:\n        UserError: ")
        named = re.findall(r"^        (\w+): ", told.partition("    Args:\n")[2], re.MULTILINE)
        assert named == list(inspect.signature(function).parameters)
        assert raised


def test_another_system_is_refused_in_a_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import draftsmith"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: draftsmith needs the locks, signals and limits of Linux"
    )


def test_type_checkers_see_the_classes_that_are_loaded_later() -> None:
    tree = ast.parse(Path(draftsmith.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in checked.body for alias in node.names}
    assert {name: f"draftsmith.{module}" for name, module in draftsmith._MODULES.items()}.items() <= seen.items()


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import draftsmith", "torch transformers jsonargparse"),
        ("import draftsmith; draftsmith.Method; draftsmith.UserError", "torch transformers jsonargparse"),
        ("import draftsmith; draftsmith.DraftHead; draftsmith.Request", "datasets wandb jsonargparse"),
    ],
)
def test_what_is_not_asked_for_is_not_imported(code: str, absent: str) -> None:
    code = f"{code}; import sys; print([name for name in {absent.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_head_is_left_as_it_is_whatever_drafts_with_it(
    loaded: tuple[draftsmith.Target, draftsmith.DraftHead],
) -> None:
    target, head = loaded
    requests = [Request(str(i), "s", (3, 4, 5 + i), 12) for i in range(3)]
    for tree in ("chain", "medusa_63", "dynamic"):
        found = draftsmith.decode(target, head, requests, tree=tree, num_speculative_tokens=2, batch=2)
        assert [len(one.output_ids) for one in found] == [12, 12, 12]
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32} or head.embed_tokens is not None
    assert head.fc.weight.dtype == torch.float32
    sampling = Sampling(1.0)
    drafter = head_system("eagle3", head.to(target.dtype), 2, 2).make(2)
    expected = decode_batch(target, drafter, requests, sampling, rows=2).generations
    found = draftsmith.decode(target, head, requests, sampling=sampling, num_speculative_tokens=2, batch=2)
    assert [one.output_ids for one in found] == [one.output_ids for one in expected]
    head.float()


def test_drafting_between_steps_changes_nothing_of_the_training(place: Path) -> None:
    """Of a head in the dtype of its target, too: its mode decides noise, dropout and the rows that it learns from."""
    target = draftsmith.load_target(place / "models/my-model")
    head = draftsmith.load_head(place / "runs/eagle3-my-model/train/best", target).train()
    were = [(name, type(module), module.training) for name, module in head.named_modules()]
    held = [(parameter, parameter.requires_grad) for parameter in head.parameters()]
    answers = draftsmith.decode(target, head, [Request("a", "s", (3, 4, 5), 12)])
    draftsmith.simulate(target, head, answers)
    assert [(name, type(module), module.training) for name, module in head.named_modules()] == were
    assert all(ours is p and p.requires_grad == g for ours, (p, g) in zip(head.parameters(), held, strict=True))


def test_what_belongs_to_the_target_is_not_copied(loaded: tuple[draftsmith.Target, draftsmith.DraftHead]) -> None:
    target, head = loaded
    drafting = draftsmith._drafts(target, head, 2, "chain").head
    assert drafting.fc.weight.dtype == target.dtype
    assert head.fc.weight.dtype == torch.float32
    assert drafting._target_head[0] is head._target_head[0]


def test_growing_trees_are_no_deeper_than_the_head(place: Path) -> None:
    target = draftsmith.load_target(place / "models/my-model")
    head = build_medusa(MedusaOptions(num_heads=3), target, None)
    requests = [Request("a", "s", (3, 4, 5), 12)]
    alone = draftsmith.decode(target, None, requests)
    for tree in ("best_first", "accum_logp"):
        assert draftsmith.decode(target, head, requests, tree=tree)[0].output_ids == alone[0].output_ids
        assert draftsmith.simulate(target, head, alone, tree=tree).tau >= 1


def test_sampling_settings_of_other_types_are_one_sentence() -> None:
    for change, said in (
        ({"top_k": 50.0}, "top_k is 50.0: it must be a whole number, such as 0"),
        ({"top_k": None}, "top_k is None: it must be a whole number, such as 0"),
        ({"top_p": None}, "top_p is None: it must be a number, such as 1.0"),
        ({"temperature": "0.8"}, "temperature is '0.8': it must be a number, such as 0.0"),
        ({"min_p": True}, "min_p is True: it must be a number"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            Sampling(**change)  # type: ignore[arg-type]
    assert Sampling(np.float32(0.5), np.int64(3)).top_k == 3  # type: ignore[arg-type]


def test_mistakes_are_one_sentence(place: Path, loaded: tuple[draftsmith.Target, draftsmith.DraftHead]) -> None:
    target, head = loaded
    request = Request("a", "s", (3, 4), 4)
    answers = draftsmith.decode(target, None, [request])
    with pytest.raises(UserError, match="num_speculative_tokens is 0"):
        draftsmith.decode(target, head, [request], num_speculative_tokens=0)
    with pytest.raises(UserError, match="The answer to 'a' has no tokens: leave it out"):
        draftsmith.simulate(target, head, [Generation(request, [])])
    with pytest.raises(UserError, match="The answer to 'a' is a Tensor: give a list of token ids"):
        draftsmith.simulate(target, head, [Generation(request, torch.tensor([5, 6]))])  # type: ignore[arg-type]
    (place / "far.json").write_text("[[0], [1], [900000]]")
    for call, given in ((draftsmith.decode, [request]), (draftsmith.simulate, answers)):
        with pytest.raises(UserError, match=r"proposes rank 900000 .* but eagle3 drafts \d+ tokens: take ranks below"):
            call(target, head, given, tree=place / "far.json")  # type: ignore[operator]
    short = copy.copy(head)
    short.reads = replace(head.reads, context_length=6)
    with pytest.raises(
        UserError, match="eagle3 head reads at most 6 tokens, but the longest text with its draft has 11"
    ):
        draftsmith.decode(target, short, [request])
    with pytest.raises(
        UserError, match="eagle3 head reads at most 6 tokens, but the longest text with its draft has 11"
    ):
        draftsmith.simulate(target, short, answers)
    with pytest.raises(UserError, match="'dynamic' cannot be simulated"):
        draftsmith.simulate(target, head, answers, tree="dynamic")
    with pytest.raises(UserError, match="is a draft head"):
        draftsmith.load_target(place / "runs/eagle3-my-model/train/best")
    with pytest.raises(UserError, match=r"no key train\.lrr"):
        draftsmith.load_recipe(place / "recipes/eagle3/tiny.yaml", "--train.lrr=1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"tree": None},
            "tree is None: give chain, medusa_63, dynamic, best_first, accum_logp or the path of a JSON file",
        ),
        ({"tree": [[0], [0, 0]]}, r"tree is \[\[0\], \[0, 0\]\]: give chain"),
        ({"tree": Path("nowhere.json")}, "There is no tree 'nowhere.json'"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens is 2.0: it must be at least 1"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True: it must be at least 1"),
        ({"batch": "2"}, "batch is '2': it must be at least 1"),
        ({"head": "runs/a"}, "head is 'runs/a', of the type str: give what load_head returns"),
        ({"target": "models/a"}, "target is 'models/a', of the type str: give what load_target returns"),
        ({"sampling": 0.7}, "sampling is 0.7, of the type float: give a Sampling"),
        ({"requests": "hello"}, r"requests\[0\] is 'h', of the type str: give a Request|requests is 'hello'"),
        ({"requests": ["hello"]}, r"requests\[0\] is 'hello', of the type str: give a Request"),
        (
            {"requests": [Request("a", "s", ("input_ids", "mask"), 2)]},
            r"Prompt a holds a str: give a tuple of token ids",
        ),  # type: ignore[arg-type]
        ({"requests": [Request("a", "s", torch.ones(3), 2)]}, "Prompt a is a Tensor: give a tuple of token ids"),  # type: ignore[arg-type]
        ({"requests": [Request("a", "s", (3.0, 4), 2)]}, "Prompt a holds a float: give a tuple of token ids"),  # type: ignore[arg-type]
        ({"requests": [Request("a", "s", (3, 4), 2, 2**64 - 1)]}, "The key of a is 18446744073709551615: it must be"),
        ({"requests": [Request("a", "s", (3, 4), 2, None)]}, "The key of a is None: it must be a whole number"),  # type: ignore[arg-type]
        ({"requests": [Request("a", "s", (3, 4), None)]}, "max_new_tokens is None for a: it must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_other_types_are_one_sentence(
    loaded: tuple[draftsmith.Target, draftsmith.DraftHead], change: dict[str, Any], said: str
) -> None:
    target, head = loaded
    given = {"target": target, "head": head, "requests": [Request("a", "s", (3, 4), 2)], **change}
    with pytest.raises(UserError, match=said):
        draftsmith.decode(given.pop("target"), given.pop("head"), given.pop("requests"), **given)


def test_a_tree_may_be_named_by_its_path(
    loaded: tuple[draftsmith.Target, draftsmith.DraftHead], tmp_path: Path
) -> None:
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    target, head = loaded
    requests = [Request("a", "s", (3, 4), 6)]
    found = draftsmith.decode(target, head, requests, tree=tmp_path / "tree.json")
    assert found[0].output_ids == draftsmith.decode(target, None, requests)[0].output_ids
