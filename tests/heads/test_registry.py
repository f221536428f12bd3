"""A drafter of another package, found by its entry point: trained by a recipe, measured, loaded; broken ones refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import draftsmith.train
from draftsmith.cli.launching import find_script
from draftsmith.cli.main import main
from draftsmith.errors import UserError
from draftsmith.eval.conformance.suite import Spec, check_checkpoint, check_layouts, tiny_target
from draftsmith.heads import registry
from draftsmith.heads.export.export import export_head
from draftsmith.heads.formats.layout import layouts_of
from draftsmith.heads.formats.recognise import load_head
from draftsmith.heads.medusa import MedusaOptions
from draftsmith.heads.medusa.head import build as build_medusa
from draftsmith.heads.record import read_passport, write_passport
from draftsmith.heads.registry import find_method, method_names, methods
from draftsmith.recipe.parse import parse_recipe
from draftsmith.target.target import load_target
from tests.toy_drafter import METHOD, BigramOptions
from tests.workplace import make_workplace

pytestmark = pytest.mark.full

TOY = "tests.toy_drafter:METHOD"


def install(folder: Path, package: str, **methods: str) -> None:
    """Put what pip would write of a package into `folder`: its name and its entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in methods.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines]))


@pytest.fixture(name="site")
def _site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    return site


def test_a_package_adds_a_method_and_ours_stay(site: Path) -> None:
    ours = tuple(methods())
    assert method_names() == ours
    install(site, "toy", bigram=TOY)
    assert find_method("bigram") is METHOD
    assert method_names() == (*ours, "bigram")
    assert "bigram" not in methods()
    recipe = parse_recipe(["--method", "bigram", "--head.depth", "3"])
    assert (recipe.method, recipe.head) == ("bigram", BigramOptions(3))
    with pytest.raises(UserError, match=r"no key head\.deth \(did you mean head\.depth"):
        parse_recipe(["--method", "bigram", "--head.deth", "3"])
    names = ", ".join(sorted([*methods(), "bigram"]))
    with pytest.raises(UserError, match=rf"The method 'trigram' is unknown: choose one of {names}\.$"):
        find_method("trigram")


def test_it_is_launched_by_a_file_that_is_there(site: Path) -> None:
    install(site, "toy", bigram=TOY)
    assert find_script("bigram") == Path(next(iter(draftsmith.train.__path__))) / "head.py"
    assert all(find_script(name).is_file() for name in methods())


def test_nothing_is_imported_before_it_is_asked_for(site: Path) -> None:
    install(site, "toy", bigram="not_there.method:METHOD")
    assert find_method("eagle3") is methods()["eagle3"]
    assert parse_recipe(["--method", "eagle3"]).method == "eagle3"


BROKEN = {
    "no module": (
        "not_there.method:METHOD",
        r"cannot be imported \(ModuleNotFoundError: No module named 'not_there'\)",
    ),
    "no object": ("tests.toy_drafter:NOTHING", r"cannot be imported \(AttributeError: .*NOTHING"),
    "no method": (
        "tests.toy_drafter:BigramOptions",
        "is no Method of draftsmith.heads.registry but type: its entry point",
    ),
    "no options": ("lame:OPTIONS", r"cannot be imported \(AttributeError: .*Missing"),
    "no drafter": ("lame:DRAFTER", r"cannot be imported \(AttributeError: .*Missing"),
    "no build": ("lame:BUILD", r"cannot be imported \(AttributeError: .*build"),
    "no dataclass": ("lame:PLAIN", r"has options that are no dataclass \(:Plain\)"),
    "an error": ("lame_error:METHOD", r"cannot be imported \(ZeroDivisionError: division by zero\)"),
}
LAME = """
from draftsmith.heads.registry import Method
from tests.toy_drafter import METHOD
from dataclasses import replace
class Plain: pass
OPTIONS = replace(METHOD, options="tests.toy_drafter:Missing")
DRAFTER = replace(METHOD, drafter=":Missing")
BUILD = replace(METHOD, head="os.path")
PLAIN = replace(METHOD, package="lame", head="tests.toy_drafter", options=":Plain", drafter="tests.toy_drafter:BigramDrafter")
"""


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_one_sentence_with_its_name(case: str, site: Path) -> None:
    (site / "lame.py").write_text(LAME)
    (site / "lame_error.py").write_text("METHOD = 1 / 0\n")
    path, words = BROKEN[case]
    install(site, "lame-drafts", bad=path)
    with pytest.raises(UserError, match=f"The method 'bad' of the installed package lame-drafts {words}") as caught:
        parse_recipe(["--method", "bad"])
    assert "\n" not in str(caught.value)


def test_an_entry_point_and_its_heads_have_one_name(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Else a checkpoint would name a method that nobody knows, after the whole training."""
    install(site, "toy", trigram=TOY)
    workplace = make_workplace(tmp_path)
    words = ["--recipe", str(workplace / "recipe.yaml"), "--output_dir", str(tmp_path / "run")]
    content = yaml.safe_load((workplace / "recipe.yaml").read_text()) | {"method": "trigram", "head": {}}
    (workplace / "recipe.yaml").write_text(yaml.safe_dump(content))
    assert main(["train", *words]) == 2
    assert (
        "method is 'trigram', but the package that adds it makes heads of the method 'bigram'"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run" / "train").exists()
    with pytest.raises(AssertionError, match="A head of trigram calls itself bigram"):
        check_checkpoint(Spec("trigram", BigramOptions(), tiny_target()))


def test_names_that_are_taken_are_refused(site: Path) -> None:
    install(site, "rude", medusa=TOY)
    words = "The installed package rude adds a method named 'medusa', which draftsmith has: uninstall it"
    for ask in (method_names, lambda: find_method("bigram"), lambda: parse_recipe(["--method", "medusa"])):
        with pytest.raises(UserError, match=words):
            ask()


def test_two_packages_with_one_name_are_refused(site: Path) -> None:
    install(site, "first", bigram=TOY)
    install(site, "second", bigram=TOY)
    with pytest.raises(UserError, match=r"named 'bigram', which the package (first|second) adds too: uninstall it"):
        find_method("bigram")


@pytest.mark.slow
def test_a_recipe_trains_and_measures_it(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "toy", bigram=TOY)
    workplace = make_workplace(tmp_path)
    recipe = yaml.safe_load((workplace / "recipe.yaml").read_text())
    recipe |= {"method": "bigram", "head": {"depth": 2}, "train": {**recipe["train"], "optimizer": "adamw", "lr": 0.1}}
    (workplace / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["--recipe", str(workplace / "recipe.yaml"), "--output_dir", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run/train/metrics.jsonl").read_text().splitlines()]
    taus = [step["tau"]["overall"] for step in steps if "tau" in step]
    assert max(taus) > 1
    assert steps[-1]["loss"] < steps[0]["loss"]
    # The same command goes on from there: evaluation of what was trained, and no export.
    assert main(["run", *words]) == 0
    assert "export  none: no layout holds such heads" in capsys.readouterr().out
    result = json.loads((tmp_path / "run/evaluation/t0/result.json").read_text())
    lossless = result["drafters"]["bigram"]["overall"]["lossless"]
    assert lossless["equal"] == lossless["checked"] == 4
    assert lossless["tau"] == pytest.approx(lossless["tau_simulated"])
    assert main(["export", *words]) == 2
    assert "bigram heads cannot be exported yet" in capsys.readouterr().err
    words += ["--target.path", str(workplace / "target"), "--data.limit", "80"]
    assert main(["plan", *words, "--device", "h100"]) == 0
    said = capsys.readouterr().out
    assert "guessed: training" not in said
    assert "trained parameters with adamw" in said


@pytest.mark.slow
def test_a_method_brings_its_layout(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import toy_layout

    served = replace(METHOD, formats="tests.toy_layout")
    monkeypatch.setattr("tests.toy_drafter.METHOD", served)
    install(site, "toy", bigram=TOY)
    assert list(layouts_of("bigram")) == ["bigram_table"]
    assert check_layouts(Spec("bigram", BigramOptions(), tiny_target(), learning_rate=0.1)) == ["bigram_table"]
    workplace = make_workplace(tmp_path)
    recipe = yaml.safe_load((workplace / "recipe.yaml").read_text())
    recipe |= {"method": "bigram", "head": {"depth": 2}, "train": {**recipe["train"], "optimizer": "adamw", "lr": 0.1}}
    recipe["export"] = {"layout": "bigram_table", "dtype": "bfloat16"}
    (workplace / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["--recipe", str(workplace / "recipe.yaml"), "--output_dir", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    assert main(["export", *words]) == 0
    folder = tmp_path / "run" / "export" / "bigram_table"
    assert load_file(folder / "model.safetensors")["table"].dtype == torch.bfloat16
    assert "No engine that draftsmith knows reads this layout." in (folder / "README.md").read_text()
    # The export is a head to measure and to start from like any other.
    target = load_target(str(workplace / "target"))
    table = load_head(folder, target).state_dict()["table"]
    assert torch.equal(table, load_head(tmp_path / "run" / "train" / "best", target).state_dict()["table"].bfloat16())
    other = ["--output_dir", str(tmp_path / "more"), "--data_dir", str(tmp_path / "run"), "--head", str(folder)]
    assert main(["evaluate", "--no-decode", *words, *other]) == 0
    assert main(["train", *words, *other[:4], "--train.warm_start", str(folder)]) == 0
    monkeypatch.setattr("tests.toy_drafter.METHOD", METHOD)
    with pytest.raises(UserError, match="in the layout 'bigram_table', which no installed package adds: install"):
        load_head(folder, target)
    monkeypatch.setattr("tests.toy_drafter.METHOD", served)
    # Its loader is the one that is asked whether the export is the head.
    monkeypatch.setattr(
        toy_layout,
        "LAYOUTS",
        (replace(toy_layout.LAYOUTS[0], load=lambda p, t: toy_layout.build(BigramOptions(), t, None)),),
    )
    with pytest.raises(AssertionError, match="other logits"):
        main(["export", *words, "--redo", "export"])


def test_a_layout_keeps_off_our_names(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import toy_layout

    monkeypatch.setattr("tests.toy_drafter.METHOD", replace(METHOD, formats="tests.toy_layout"))
    taken = replace(toy_layout.LAYOUTS[0], schema=replace(toy_layout.SCHEMA, name="medusa"))
    monkeypatch.setattr(toy_layout, "LAYOUTS", (taken,))
    install(site, "toy", bigram=TOY)
    with pytest.raises(UserError, match=r"The method 'bigram' brings a layout named 'medusa', which draftsmith has"):
        layouts_of("bigram")


def test_a_method_may_be_served_as_one_of_ours(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.toy_drafter.METHOD", replace(METHOD, served_as="medusa"))
    install(site, "toy", bigram=TOY)
    assert layouts_of("bigram") == layouts_of("medusa")
    # What is recorded beside an export of it is a layout of ours, which its files tell.
    target = tiny_target()
    folder = export_head(
        build_medusa(MedusaOptions(2), target, None).eval(), target, tmp_path / "out", layout="medusa_vllm"
    )
    passport = read_passport(folder)
    assert passport is not None
    write_passport(folder, replace(passport, method="bigram"))
    assert load_head(folder, target).method == "medusa"


def test_the_guide_counts_its_lines() -> None:
    """CONTRIBUTING.md says how much a drafter takes."""
    lines = (Path(__file__).parents[1] / "toy_drafter.py").read_text().splitlines()
    starts = [
        i for i, line in enumerate(lines) if line.startswith(("class BigramH", "def build", "class BigramD", "METHOD"))
    ]
    head, build, drafter, method = starts
    told = " ".join((Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().split())
    counts = f"a whole one in {len(lines)} lines, of which the head with its training forward takes {build - head - 2}"
    assert f"{counts} and the decoder's side {method - drafter - 2};" in told
