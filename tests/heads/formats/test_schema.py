"""Layouts hold what their engines read: each is compared with a listing that was written from the engine's source (golden/), and
what does not fit its schema is refused; which layouts hold which heads; and their folders."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.heads.checkpoint import write_model_files
from draftsmith.heads.export.export import convert_head, export_head
from draftsmith.heads.formats.layout import default_layout, find_layout, layouts, layouts_of
from draftsmith.heads.formats.schema import ModelFiles
from draftsmith.heads.registry import methods
from tests.exports import (
    PLAIN,
    VOCAB,
    make_dflash,
    make_dflash2,
    make_dspark,
    make_eagle1,
    make_eagle3,
    make_hydra,
    make_jetspec,
    make_medusa,
    make_peagle,
    make_target,
)

GOLDEN = Path(__file__).parent / "golden"
# Heads with as many of a layout's tensors as one can have, from the richest to those that more layouts take.
RICH: dict[str, tuple[Callable[..., Any], ...]] = {
    "dflash": (lambda t: make_dflash(t, VOCAB), make_dflash),
    "dflash2": (lambda t: make_dflash2(t, sliding_window=9),),
    "dspark": (lambda t: make_dspark(t, VOCAB),),
    "eagle1": (lambda t: make_eagle1(t, qkv_bias=True, fc_bias=True), lambda t: make_eagle1(t, qkv_bias=True)),
    "eagle3": (
        lambda t: make_eagle3(t, norm_before_residual=True, fc_norm=True, norm_output=True),
        lambda t: make_eagle3(t, norm_before_residual=True),
    ),
    "hydra": (lambda t: make_hydra(t, num_layers=2, prefix_attention=True),),
    "jetspec": (lambda t: make_jetspec(t, VOCAB),),
    "peagle": (
        lambda t: make_peagle(t, norm_before_residual=True, sliding_window=9, fc_norm=True),
        lambda t: make_peagle(t, norm_before_residual=True, sliding_window=9),
    ),
}


def files_for(layout: str) -> ModelFiles:
    """The files of the first head that the layout takes, with embeddings where it has them."""
    for make in RICH.get(layouts()[layout].method, (PLAIN[layouts()[layout].method],)):
        for embeddings in (True, False):
            target, more = make_target(), {"num_speculative_tokens": 4, "include_embeddings": embeddings}
            with suppress(UserError):
                return convert_head(make(target), target, layout=layout, **more)
    raise AssertionError(f"{layout} takes none of the heads here")


def listing(files: ModelFiles) -> dict[str, Any]:
    """Shapes of float32 by name, those of others behind their dtype; and config.json."""
    kinds = {name: str(x.dtype).removeprefix("torch.") for name, x in files.tensors.items()}
    shapes = {n: [*([kinds[n]] * (kinds[n] != "float32")), *x.shape] for n, x in files.tensors.items()}
    return {"weights": files.weights, "tensors": shapes, "config": json.loads(json.dumps(files.config))}


@pytest.mark.parametrize("layout", layouts())
def test_the_files_are_what_the_engine_reads(layout: str) -> None:
    golden = json.loads((GOLDEN / f"{layout}.json").read_text(encoding="utf-8"))
    assert golden.pop("source"), "name the source that this was written from"
    assert listing(files_for(layout)) == golden


BROKEN: dict[str, tuple[str, Callable[[ModelFiles], Any], str]] = {
    "missing": ("eagle3", lambda f: f.tensors.pop("norm.weight"), r"norm\.weight: expected one, got nothing"),
    "missing, by the configuration": ("eagle3", lambda f: f.tensors.pop("d2t"), r"d2t: expected one, got nothing"),
    "without its flag": ("eagle3", lambda f: f.config.update(fc_norm=False), r"fc_norm\.0\.weight: expected no such tensor"),
    "unknown": ("eagle3", lambda f: f.tensors.update({"model.norm.weight": torch.ones(64)}), r"model\.norm\.weight: expected no such tensor, got one of"),
    "other integers": ("eagle3", lambda f: f.tensors.update(d2t=f.tensors["d2t"].int()), r"d2t: expected torch\.int64, got torch\.int32"),
    "mixed dtypes": ("eagle3", lambda f: f.tensors.update({"norm.weight": f.tensors["norm.weight"].half()}), r"norm\.weight: expected torch\.float32"),
    "another depth": ("medusa", lambda f: f.tensors.update({"0.2.weight": f.tensors.pop("0.1.weight")}), r"0\.2\.weight: expected no such tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_the_schema_is_one_sentence(case: str) -> None:
    layout, change, words = BROKEN[case]
    files = files_for(layout)
    layouts()[layout].schema.check(files)
    change(files)
    sentence = (
        f"^The export does not fit the layout {layout}: tensor {words}.*; this is a fault of draftsmith, so report it"
    )
    with pytest.raises(UserError, match=sentence):
        layouts()[layout].schema.check(files)


@pytest.mark.parametrize("layout", layouts())
def test_a_tensor_of_another_shape_is_refused_by_the_reading_that_follows_every_export(
    layout: str, tmp_path: Path
) -> None:
    files = files_for(layout)
    write_model_files(tmp_path, files.config, files.tensors, files.weights)
    layouts()[layout].load(tmp_path, make_target())
    for name, value in files.tensors.items():
        cut = value[..., :-1] if value.any() else torch.ones_like(value[..., :-1])  # zeros may stand for no bias
        folder = tmp_path / name
        folder.mkdir()
        write_model_files(folder, files.config, {**files.tensors, name: cut}, files.weights)
        with pytest.raises(UserError):
            layouts()[layout].load(folder, make_target())


@pytest.mark.parametrize(
    "layout", [name for name in layouts() if "hidden_act" in (GOLDEN / f"{name}.json").read_text("utf-8")]
)
def test_an_activation_that_engines_do_not_compute_is_refused(layout: str) -> None:
    """A published head may have it: it is read, drafts and is measured, but every engine would run it with SiLU in silence."""
    target = make_target()
    head = PLAIN[layouts()[layout].method](target)
    convert_head(head, target, layout=layout, num_speculative_tokens=4)
    head.config.hidden_act = "gelu"
    with pytest.raises(UserError, match="activation"):
        convert_head(head, target, layout=layout, num_speculative_tokens=4)


def test_layouts_belong_to_one_method():
    named = [layout.name for method in methods().values() for layout in method.layouts]
    assert len(named) == len(set(named))
    assert layouts_of("medusa2") == layouts_of("medusa")
    exported = [name for name in methods() if layouts_of(name)]
    assert {name: default_layout(name) for name in exported if default_layout(name) != name} == {"medusa2": "medusa"}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("eagle3", f"'eagle3', which holds eagle3 heads, not medusa: choose one of {', '.join(layouts_of('medusa'))}."),
        ("onnx", f"'onnx', which is unknown: choose one of {', '.join(layouts_of('medusa'))}."),
    ],
)
def test_another_layout_is_one_sentence(layout, words, tmp_path):
    target = make_target()
    with pytest.raises(UserError, match=words):
        export_head(make_medusa(target), target, tmp_path / "out", layout=layout)
    with pytest.raises(UserError, match="which holds medusa heads, not eagle3: choose one of eagle3, "):
        find_layout("medusa_vllm", "eagle3")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_an_export_to_the_default_layout_replaces_one_of_its_kind_and_nothing_else(method, tmp_path):
    target = make_target()
    head = PLAIN[method](target)
    place, weights = export_head(head, target, tmp_path / "out"), layouts()[method].schema.weights
    assert {f.name for f in place.iterdir()} == {"README.md", "config.json", "draftsmith.json", weights}
    (place / "config.json").write_text("{}")
    export_head(head, target, place)
    assert json.loads((place / "config.json").read_text()) != {}
    foreign = "medusa_lm_head.pt" if method == "eagle3" else "model.safetensors"
    (place / foreign).write_text("mine")
    with pytest.raises(UserError, match=f"not a model folder .it holds .'{foreign}'"):
        export_head(head, target, place)
    assert (place / foreign).read_text() == "mine"
