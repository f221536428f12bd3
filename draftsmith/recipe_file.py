"""Reading recipes: YAML and dotted command-line overrides into a Recipe.

Unknown keys and wrong types are errors that name the key; `--section.key value` overrides the file.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, ParserError, set_parsing_settings

from draftsmith.errors import UserError
from draftsmith.heads.registry import METHODS
from draftsmith.recipe import (
    AnswersSpec,
    DataSpec,
    EvaluateSpec,
    ExportSpec,
    FeaturesSpec,
    Recipe,
    TargetSpec,
    TrackingSpec,
    TrainSpec,
)

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_SECTIONS: dict[str, type] = {
    "target": TargetSpec,
    "data": DataSpec,
    "answers": AnswersSpec,
    "features": FeaturesSpec,
    "train": TrainSpec,
    "evaluate": EvaluateSpec,
    "export": ExportSpec,
    "tracking": TrackingSpec,
}


def recipe_parser(method: str, prog: str | None = None, description: str | None = None) -> ArgumentParser:
    """Return the parser of recipes for one drafter, whose options make up the section `head`."""
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--recipe", metavar="FILE", help="Recipe in YAML; other options override its keys.")
    parser.add_argument("--name", type=str, default="run", help="Name of the run.")
    parser.add_argument("--output_dir", type=str | None, default=None, help="Run directory; by default runs/<name>.")
    parser.add_argument(
        "--data_dir",
        type=str | None,
        default=None,
        help="Folder of answers and hidden states, which several recipes may share; by default the run directory.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of sampling, initialisation and shuffling.")
    parser.add_argument("--method", type=Literal[tuple(METHODS)], default=method, help="The drafter.")
    for key, section in _SECTIONS.items():
        parser.add_class_arguments(section, key)
    parser.add_class_arguments(METHODS[method].options, "head")
    return parser


def load_yaml(path: str) -> dict[str, Any]:
    """Read a recipe file as a mapping. Raises UserError when it is missing or not a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except FileNotFoundError as error:
        raise UserError(f"There is no recipe at {path}: check the path; recipes/ holds examples.") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"The recipe {path} cannot be read as YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise UserError(f"The recipe {path} is not a mapping of keys: see recipes/eagle3/tiny.yaml for the form.")
    return content


def parse_recipe(argv: list[str], prog: str | None = None, description: str | None = None) -> Recipe:
    """Parse `--recipe FILE` and dotted overrides into a Recipe. `--help` prints every key and exits.

    Raises UserError that names the key for unknown keys and wrong types.
    """
    path = _option(argv, "--recipe")
    content = load_yaml(path) if path else {}
    method = _option(argv, "--method") or content.get("method", "eagle3")
    if method not in METHODS:
        raise UserError(f"method is {method!r}: the drafters are {', '.join(METHODS)}.")
    parser = recipe_parser(method, prog, description)
    try:
        base = parser.parse_object(content) if content else parser.get_defaults()
        chosen = parser.parse_args(argv, namespace=base) if argv else base
        ready = parser.instantiate(chosen)
    except (ParserError, ArgumentError) as error:
        raise UserError(f"{_where(path)}{_first_sentence(str(error))}") from error
    names = {f.name for f in fields(Recipe)}
    return Recipe(**{key: value for key, value in vars(ready).items() if key in names})


def _option(argv: list[str], name: str) -> str | None:
    """Return the value of a `--name value` or `--name=value` option, which is needed before parsing."""
    for place, word in enumerate(argv):
        if word == name and place + 1 < len(argv):
            return argv[place + 1]
        if word.startswith(name + "="):
            return word.split("=", 1)[1]
    return None


def _where(path: str | None) -> str:
    return f"The recipe {path} or its overrides: " if path else "The options: "


def _first_sentence(message: str) -> str:
    """Keep what names the key and the reason, without the parser's layout."""
    return " ".join(message.split()).rstrip(".") + "; see --help for every key and its type."
