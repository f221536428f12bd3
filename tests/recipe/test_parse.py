"""Recipes: every file parses, overrides set their key, mistakes are named."""

import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from draftsmith.decoder.sampling import Sampling
from draftsmith.decoder.trees import DynamicTree
from draftsmith.errors import UserError
from draftsmith.heads.registry import methods
from draftsmith.recipe.evaluate import DraftSpec, EvaluateSpec
from draftsmith.recipe.options import Option, take_options
from draftsmith.recipe.parse import parse_recipe

pytestmark = pytest.mark.full

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
RECIPE_FILES = sorted(p for p in RECIPES.glob("*/*.yaml") if p.parent.name != "accelerate")
TINY = str(RECIPES / "eagle3" / "tiny.yaml")


def write(folder: Path, text: str) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return ["--recipe", str(path)]


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_recipe_parses(path: Path) -> None:
    recipe = parse_recipe(["--recipe", str(path)])
    assert recipe.method == path.parent.name
    assert recipe.name.startswith(recipe.method.replace("_", "-"))
    assert isinstance(recipe.head, methods()[recipe.method].options_class)
    with pytest.raises(FrozenInstanceError):
        recipe.name = "other"  # type: ignore[misc]


def test_yaml_values_and_overrides_reach_their_keys(tmp_path: Path) -> None:
    words = write(tmp_path, "name: x\ntrain:\n  lr: 3e-4\n  betas: [0.9, 0.99]\nhead:\n  layer_ids: [1, 2]\n")
    recipe = parse_recipe(
        [*words, "--train.epochs", "9", "--head.ttt_steps=2", "--data.template.enable_thinking", "false"]
    )
    assert recipe.train.lr == 3e-4
    assert recipe.train.betas == [0.9, 0.99]
    assert recipe.train.epochs == 9
    assert recipe.head.layer_ids == [1, 2]
    assert recipe.head.ttt_steps == 2
    assert recipe.data.template == {"enable_thinking": False}
    assert recipe.run_dir == Path("runs/x")
    assert parse_recipe([*words, "--output_dir", "elsewhere"]).run_dir == Path("elsewhere")


def test_texts_of_a_template_stay_texts(tmp_path: Path) -> None:
    """Which YAML would read as other values when it is read twice."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        'data:\n  template: {a: "off", b: "1.10", c: off, d: 2, e: "[x]", f: "null", g: plain, h: ["off"]}\n'
    )
    expected = {"a": "off", "b": "1.10", "c": False, "d": 2, "e": "[x]", "f": "null", "g": "plain", "h": ["off"]}
    words = ["--recipe", str(path)]
    assert parse_recipe(words).data.template == expected
    assert parse_recipe([*words, "--data.template.a", "on"]).data.template == expected | {"a": True}
    assert parse_recipe([*words, '--data.template.a="on"']).data.template == expected | {"a": "on"}
    assert parse_recipe([*words, "--data.template", '{"a": "off"}']).data.template == {"a": "off"}
    assert parse_recipe([*words, "--data.template.z", "'1'"]).data.template == expected | {"z": "1"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train:\n  learning_rate: 1\n", "learning_rate"),
        ("hed:\n  ttt_steps: 3\n", "hed"),
        ("head:\n  steps: 3\n", "steps"),
        ("train:\n  epochs: many\n", "epochs"),
        ("train:\n  precision: fp4\n", "precision"),
        ("train:\n  loss:\n    kind: mse\n", "kind"),
        ("method: medusaa\n", "medusaa"),
        ("- a\n- b\n", "not a mapping"),
        ("a: [1\n", "is not YAML"),
        ("name: x\n\ttarget:\n", "line 2 .* not with tabs"),
        ("train:\n  lr: 1\nname: x\ntrain:\n  rows: 2\n", "'train' stands there twice, in lines 1 and 4"),
        ("target: embedded\n", "target is 'embedded', but it is a section"),
        (
            "evaluate:\n  drafts: [{tre: chain}]\n",
            r"evaluate\.drafts has no key tre \(did you mean tree\?\): its keys are tree, ",
        ),
        (
            "evaluate:\n  baselines: [{kin: x}]\n",
            r"evaluate\.baselines has no key kin \(did you mean kind\?\): its keys are kind",
        ),
        ("evaluate: []\n", r"evaluate is \[\], but it is a section"),
        ("train:\n  loss: kl\n", r"train\.loss is 'kl', but it is a section"),
        ("train:\n  lr:\n", r"train\.lr is null, which it cannot be"),
        ("name:\n", "name is null"),
        ("method:\n", "method is null"),
        ("head:\n  ttt_steps:\n", r"head\.ttt_steps is null"),
        ("data:\n  template:\n", r"data\.template is null"),
        ("evaluate:\n  drafts: [chain]\n", r"drafts holds 'chain', which is no mapping: write \[\{tree: chain\}\]"),
        ("evaluate:\n  drafts: [{tree: [chain]}]\n", r"evaluate\.drafts\.tree is .*, which is not text"),
        ("trian:\n  lr: 1\n", r"no key trian\.lr \(did you mean train\.lr\?\)"),
        ("features:\n  layer_ids: 3\n", "which is not a list of whole numbers or null"),
        ("data:\n  template: x\n", "which is not a mapping such as"),
        ("target:\n  attn_implementation: flash\n", r"not one of \['sdpa', 'eager'\]"),
        ("train:\n  lr: .inf\n", r"train\.lr is inf: it must be from 0 to 100"),
        ("evaluate:\n  temperatures: [0, 0.0]\n", r"evaluate\.temperatures is .*the same one is named twice"),
        ("evaluate:\n  max_new_tokens_by_slice: {chat: 0}\n", r"evaluate\.max_new_tokens_by_slice\.chat is 0"),
        ("target:\n  pth: x\n", r"no key target\.pth \(did you mean target\.path\?\): `"),
    ],
)
def test_mistakes_in_the_file_name_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        parse_recipe(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_reading_a_recipe_needs_no_transformers() -> None:
    """Which takes seconds to import."""
    code = "import sys; from draftsmith import load_recipe; load_recipe('eagle3/tiny'); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_empty_sections_are_the_defaults(tmp_path: Path) -> None:
    sections = ("target", "data", "answers", "features", "head", "train", "evaluate", "export", "tracking")
    empty = parse_recipe(write(tmp_path, "".join(f"{section}:\n" for section in sections)))
    assert empty == parse_recipe([]) == parse_recipe(write(tmp_path, "train:\n  loss:\n  max_steps: null\n"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--recipe", "nowhere.yaml"], "nowhere.yaml"),
        (["--recipe", ""], "--recipe is empty: name a file"),
        (["--recipe="], "--recipe is empty: name a file"),
        (["--data.sources", "&a [*a]"], "data.sources, line 1: the value named by an anchor contains"),
        (["--train.betas", "[" * 50 + "]" * 50], "train.betas is nested deeper than 30 levels"),
        ([f"--data.split={'x' * 70000}"], r"data.split is 'xxx.*, which has more than 65536 characters"),
        (["--data.split", "a\0b"], r"data.split is 'a\\x00b', which holds a NUL character"),
        (["--train", TINY], "train is .*tiny.yaml', but it is a section: set its keys"),
        (["--train.epoch", "3"], "train.epoch"),
        (["--train.epochs", "three"], "train.epochs"),
        (["--train.epochs"], "train.epochs"),
        (["--recipe", str(RECIPES)], "is a folder"),
        (["--data.limt", "3"], r"no key data\.limt \(did you mean data\.limit\?\): `"),
        (["--heldout", "3"], r"did you mean data\.heldout\?"),
        (["--nodecode"], "no key nodecode: `"),
        (["--data.limit", "1.5"], "data.limit is '1.5', which is not a whole number or null"),
        (["--data.sources", "a.jsonl"], "data.sources is 'a.jsonl', which is not a list"),
        (["--train.optimizer", "sgd"], r"not one of \['adamw', 'muon'\]"),
        (["--head.ttt_step", "2"], r"`draftsmith train --method eagle3 --help` lists every key"),
        (["--train.betas", "[0.9, 1.0]"], r"train\.betas is 1.0: it must be from 0 to below 1"),
        (["--evaluate.temperatures", "[0, -1]"], r"evaluate\.temperatures is -1\.0"),
        (["--head", "3"], r"head is '3', but it is a section: set its keys, as in --head\.KEY"),
        (["--train.loss", "kl"], r"train\.loss is 'kl', but it is a section"),
        (["--evaluate.drafts", "[chain]"], r"holds 'chain', which is no mapping: write"),
        (["--evaluate.baselines", "[{knd: x}]"], r"evaluate\.baselines has no key knd \(did you mean kind\?\)"),
        (["--evaluate.baselines", "prompt_lookup"], "is 'prompt_lookup', which is not a list"),
    ],
)
def test_mistakes_on_the_command_line_name_the_key(words: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_recipe(words if words[0].startswith("--recipe") else ["--recipe", TINY, *words])


def test_floors_may_be_more_than_max_k() -> None:
    """Texts leave room for the longest draft, whichever way names it."""
    spec = EvaluateSpec(num_speculative_tokens=3, max_k=3)
    assert spec.longest_chain == 3
    assert replace(spec, drafts=[DraftSpec(), DraftSpec(floors=[0.1] * 8)]).longest_chain == 8


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "drafts",
            "{tree: chain, depth: 3}",
            "tree chain: depth is 3: only a tree of dynamic, best_first, accum_logp takes it",
        ),
        (
            "drafts",
            "{tree: medusa_63, branching: 3}",
            "branching is 3: only a tree of dynamic, best_first, accum_logp takes it",
        ),
        (
            "drafts",
            "{tree: medusa_63, total_tokens: 9}",
            "total_tokens is 9: only a tree of dynamic, best_first, accum_logp takes it",
        ),
        ("drafts", "{tree: dynamic, depth: 0}", "depth is 0: it must be from 1 to 64, or null"),
        ("drafts", "{tree: dynamic, children: drawn}", "children is 'drawn': only a static tree takes it"),
        ("drafts", "{tree: dynamic, budgets: [9]}", "only a tree of best_first, accum_logp takes them"),
        ("drafts", "{tree: best_first, budgets: [9, 1]}", "it must be from 2 to 1024"),
        ("drafts", "{tree: chain, children: likely}", "children is 'likely': only a static tree takes it"),
        ("drafts", "{window: 0}", "window"),
        (
            "drafts",
            "{tree: dynamic, floors: [0.5]}",
            r"floors is \[0\.5\]: a chain without confidence_threshold takes one or more",
        ),
        ("drafts", "{tree: chain, floors: [0.5, 3]}", "floors is 3.0: it must be"),
        ("drafts", "{tree: dynamic, confidence_threshold: 0.5}", "confidence_threshold is 0.5: only a chain takes it"),
        ("drafts", "{tree: medusa_63, children: all}", "is 'all', which is not one of"),
        ("drafts", "{tree: dynamic}, {tree: dynamic}", "the same way to draft is named twice"),
        ("drafts", "{tree: chain, heads: [a]}, {tree: chain, heads: [b, a]}", "the same way to draft is named twice"),
        ("drafts", "{tree: chain, heads: [a]}, {tree: chain}", "the same way to draft is named twice"),
        ("drafts", "{tree: chain, epsilon: 0.2}", r"epsilon is 0\.2: only acceptance: typical takes it"),
        (
            "drafts",
            "{tree: chain, acceptance: typical, delta: 0.1}, {tree: chain, acceptance: typical}",
            r"named twice \(thresholds of typical acceptance apart\)",
        ),
        ("baselines", "{kind: ngram}", "kind is 'ngram': choose prompt_lookup, suffix, lookahead or draft_model"),
        ("baselines", "{max_ngram: 2}", "kind is '': choose prompt_lookup, suffix, lookahead or draft_model"),
        ("baselines", "{kind: prompt_lookup, path: x}", "path is 'x': only draft_model takes it"),
        ("baselines", "{kind: prompt_lookup, max_ngram: 0}", "max_ngram is 0: it must be from 1 to 64, or null"),
        ("baselines", "{kind: draft_model}", "path is None: name the folder of the draft model"),
        ("baselines", "{kind: draft_model, path: x, max_ngram: 2}", "max_ngram is 2: only prompt_lookup takes it"),
        ("baselines", "{kind: prompt_lookup}, {kind: prompt_lookup}", "the same one is named twice"),
        ("baselines", "{kind: prompt_lookup, W: 5}", "W is 5: only lookahead takes it"),
        ("baselines", "{kind: lookahead, tree: false}", "tree is False: only suffix takes it"),
        ("baselines", "{kind: lookahead, N: 1}", "N is 1: it must be from 2 to 32, or null"),
        ("baselines", "{kind: suffix, alpha: 0}", "alpha is 0[.0]*: it must be above 0 and at most 64, or null"),
        (
            "baselines",
            "{kind: suffix, max_cached_requests: 3}",
            "max_cached_requests is 3: it counts answers of `outputs`; name those",
        ),
    ],
)
def test_ways_to_draft_take_their_own_keys_only(key: str, value: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        parse_recipe(["--recipe", TINY, f"--evaluate.{key}", f"[{value}]"])
    assert f"evaluate.{key}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ways_to_draft_reach_the_evaluation() -> None:
    drafts = (
        "[{tree: dynamic}, {tree: dynamic, depth: 3, branching: 4, total_tokens: 20}, {tree: medusa_63, children: drawn}, "
        "{tree: dynamic, weights: int8}]"
    )
    baselines = "[{kind: prompt_lookup, max_ngram: 4}, {kind: draft_model, path: small}]"
    words = ["--evaluate.min_p", "0.1", "--evaluate.repetition_penalty", "1.2", "--answers.min_p", "0.3"]
    recipe = parse_recipe(["--recipe", TINY, "--evaluate.drafts", drafts, "--evaluate.baselines", baselines, *words])
    spec = recipe.evaluate
    assert [draft.load() for draft in spec.drafts[:2]] == [DynamicTree(6, 8, 60), DynamicTree(3, 4, 20)]
    assert [draft.drawn for draft in spec.drafts] == [False, False, True, False]
    assert [draft.weights for draft in spec.drafts] == [None, None, None, "int8"]
    assert [(b.kind, b.path, b.max_ngram) for b in spec.baselines] == [
        ("prompt_lookup", None, 4),
        ("draft_model", "small", None),
    ]
    assert spec.sampling(0.5) == Sampling(0.5, min_p=0.1, repetition_penalty=1.2)
    assert recipe.answers.sampling.min_p == 0.3


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_recipe(["--help"], "draftsmith train", "train the head")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "--train.muon_lr" in text
    assert "Peak learning rate of Muon" in text
    assert "--head.ttt_steps" in text
    assert "Step k weighs decay**k" in text


def test_the_table_of_switches_is_that_of_the_options() -> None:
    text = (RECIPES.parent / "docs" / "drafters.md").read_text(encoding="utf-8")
    section = text.split("## What shapes a head")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    options = {name: {field.name for field in fields(method.options_class)} for name, method in methods().items()}
    printed: dict[str, set[str]] = {}
    for keys, drafters in rows:
        named = set(re.findall(r"`(\w+)`", drafters))
        for key in re.findall(r"`(\w+)`", keys):
            printed[key] = named
    assert len(printed) >= 15
    assert printed == {key: {name for name, has in options.items() if key in has} for key in printed}


def test_of_repeated_options_the_last_counts(tmp_path: Path) -> None:
    for name in ("eagle3", "medusa"):
        (tmp_path / f"{name}.yaml").write_text(f"method: {name}\ntarget: {{path: t}}\n")
    files = [f"--recipe={tmp_path}/eagle3.yaml", "--recipe", f"{tmp_path}/medusa.yaml"]
    assert parse_recipe(files).method == "medusa"
    made = parse_recipe(["--target.path", "t", "--method", "eagle3", "--method", "medusa"])
    assert (made.method, type(made.head)) == ("medusa", methods()["medusa"].options_class)


def test_no_precision_needs_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("target: {path: t}\ntrain: {precision: no}\n")
    assert parse_recipe(["--recipe", str(tmp_path / "r.yaml")]).train.precision == "no"
    assert parse_recipe(["--target.path", "t", "--train.precision", "no"]).train.precision == "no"


def test_the_home_folder_is_known_wherever_a_text_begins_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell knows it in neither."""
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: ~/runs/x\ntarget: {path: ~/models/t}\ndata: {sources: [~/a.jsonl, a~/b]}\n")
    found = parse_recipe(["--recipe", str(path), "--data_dir=~/d", "--train.warm_start", "~/head"])
    assert (found.run_dir, found.data_path) == (Path("/home/me/runs/x"), Path("/home/me/d"))
    assert (found.target.path, found.train.warm_start) == ("/home/me/models/t", "/home/me/head")
    assert found.data.sources == ["/home/me/a.jsonl", "a~/b"]
    for words in (["--data.sources", "[~/b.jsonl, 'a~/b', \"~/c\"]"], ["--data.sources=[~/b.jsonl,a~/b, ~/c]"]):
        again = parse_recipe(["--recipe", str(path), *words])
        assert again.data.sources == ["/home/me/b.jsonl", "a~/b", "/home/me/c"]
    option = Option("--output FOLDER", "", Path)
    for words in (["--output=~/r"], ["--output", "~/r"]):
        assert take_options(words, [option])[0].output == Path("/home/me/r")


def test_a_list_of_sections_is_replaced_whole(tmp_path: Path) -> None:
    """The parser would keep what an item leaves out from the one at its place, lossy acceptance for one."""
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "target: {path: m}\ndata: {sources: [d.jsonl]}\nevaluate:\n  drafts: [{tree: medusa_63, acceptance: typical, weights: int8}]\n"
        "  baselines: [{kind: suffix, outputs: a.jsonl, alpha: 4}]\n"
    )
    given = ["--recipe", str(file)]
    assert parse_recipe(given).evaluate.drafts[0].weights == "int8"
    for words in (
        ["--evaluate.drafts", "[{tree: chain}]"],
        ["--evaluate.drafts=[{tree: chain}]"],
        ["--evaluate.drafts", "[{tree: chain, window: 64}]", "--seed=1", "--evaluate.drafts", "[{tree: chain}]"],
        ["--evaluate.drafts=[{tree: chain, window: 64}]", "--evaluate.drafts", "[{tree: chain}]"],
    ):
        assert parse_recipe([*given, *words]).evaluate.drafts == [DraftSpec()], words
    kept = parse_recipe([*given, "--evaluate.baselines", "[{kind: suffix}]"]).evaluate
    assert (kept.baselines[0].outputs, kept.baselines[0].alpha, kept.drafts[0].weights) == (None, None, "int8")
    more = parse_recipe([*given, "--evaluate.drafts+", "{tree: chain}"]).evaluate.drafts
    assert [one.tree for one in more] == ["medusa_63", "chain"]
