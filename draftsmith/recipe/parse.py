"""Reading recipes, by file or by the name of an installed one: YAML and dotted command-line overrides into a Recipe.

Unknown keys and wrong types are errors that name the key; `--section.key value` overrides the file.
"""

import os
import re
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, ParserError, set_parsing_settings
from yaml import MarkedYAMLError

import draftsmith
from draftsmith.errors import UserError, did_you_mean, one_line
from draftsmith.fields import find_ranges, shown
from draftsmith.foreign.text import parse_yaml, read_yaml
from draftsmith.heads.losses.spec import describe_kinds
from draftsmith.heads.registry import find_method, method_names
from draftsmith.recipe.evaluate import BaselineSpec, DraftSpec
from draftsmith.recipe.options import Option, in_home
from draftsmith.recipe.schema import Recipe

set_parsing_settings(docstring_parse_attribute_docstrings=True)

FOLDER = Path(draftsmith.__file__).parent / "recipes"
"""The installed recipes and launch files, found by name: "eagle3/tiny", "accelerate/ddp-8gpu"."""

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "a mapping such as {key: value}",
    "list": "a list such as [a, b]",
}
_PLURALS = {"int": "whole numbers", "float": "numbers", "str": "texts"}

_SECTIONS: dict[str, type] = {
    key: kind for key, kind in get_type_hints(Recipe).items() if isinstance(kind, type) and is_dataclass(kind)
}
"""All but `head`, whose keys the method decides."""

_WHOLE = (*_SECTIONS, "head", "train.loss")
"""Sections, of which the command line takes the keys alone."""

_ITEMS: dict[str, type] = {"evaluate.drafts": DraftSpec, "evaluate.baselines": BaselineSpec}
"""Keys whose values are lists of mappings."""

MOST_VALUE = 2**16
"""The most characters of one value."""
MOST_SHOWN = 80
"""The most characters of a key or value that a sentence shows."""

_EXAMPLES = {"evaluate.drafts": "[{tree: chain}]", "evaluate.baselines": "[{kind: prompt_lookup}]"}


def recipe_parser(
    method: str, prog: str, description: str | None = None, options: Sequence[Option] = ()
) -> ArgumentParser:
    """Return the parser of recipes for one drafter, whose options make up the section `head`.

    options: of a command besides the recipe, for its help and for completion; `take_options` is what parses them.
    """
    parser = ArgumentParser(
        prog=prog,
        description=description,
        usage=f"{prog} --recipe FILE [OPTIONS]",
        exit_on_error=False,
        allow_abbrev=False,
        conflict_handler="resolve",  # a command's own --head stands for the one that takes the whole section
    )
    own = parser.add_argument_group("Options of this command")
    parser.add_argument(
        "--recipe",
        metavar="FILE",
        help="Recipe in YAML, or a name that `draftsmith recipes` lists; other options override its keys.",
    )
    parser.add_class_arguments(Recipe, skip={*_SECTIONS, "method", "head"})
    parser.add_argument("--method", type=Literal[method_names()], default=method, help="The drafter.")
    for key, section in _SECTIONS.items():
        parser.add_class_arguments(section, key)
    next(action for action in parser._actions if action.dest == "train.loss.kind").help = describe_kinds()
    head = find_method(method).options_class
    parser.add_class_arguments(head, "head")
    ranges = dict((*find_ranges(Recipe, ""), *find_ranges(head, "head.")))
    for action in parser._actions:
        if action.dest in _WHOLE:
            action.help = SUPPRESS
        elif action.dest in ranges:
            action.help = f"{(action.help or '').rstrip('.')}; {ranges[action.dest]}."
    for one in options:
        one.add_to(own, reads=False)
    return parser


@cache
def _parser_of(method: str, head: type, names: tuple[str, ...], prog: str, description: str | None) -> ArgumentParser:
    """Return `recipe_parser`, made once for the methods that are registered: reading all docstrings takes 0.2 s."""
    return recipe_parser(method, prog, description)


def _check_texts(value: Any, key: str, source: str) -> None:
    """Raise UserError for a value of a recipe or an override that JSON does not have, such as a date or a key that is no text, and for
    a text that is more than its parser, which takes texts for YAML, can read."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                where = f"{key} holds" if key else "it has"
                raise UserError(f"{source}: {where} the key {shown(name)}, which is no text: put it in quotes.")
            _check_texts(item, f"{key}.{name}"[-MOST_SHOWN:] if key else name[:MOST_SHOWN], source)
    elif isinstance(value, list):
        for item in value:
            _check_texts(item, key, source)
    elif not isinstance(value, str | int | float | None):
        raise UserError(f"{source}: {key} is a {type(value).__name__} ({shown(value)}): put it in quotes for a text.")
    elif isinstance(value, str):
        if len(value) > MOST_VALUE or "\0" in value:
            what = "holds a NUL character" if "\0" in value else f"has more than {MOST_VALUE} characters"
            raise UserError(f"{source}: {key} is {shown(value)}, which {what}: give it another value.")
        with suppress(MarkedYAMLError):  # which leaves it as it is
            parse_yaml(value, f"{source}: {key}", "give it another value")


def parse_recipe(
    argv: list[str], prog: str = "draftsmith train", description: str | None = None, options: Sequence[Option] = ()
) -> Recipe:
    """Parse `--recipe FILE` and dotted overrides into a Recipe. `--help` prints every key and exits.

    options: those of the command `prog`, already taken out of `argv`, which its help lists and a typo may have meant.
    Raises UserError that names the key for unknown keys and wrong types.
    """
    path = _option(argv, "--recipe")
    if path == "":
        raise UserError("--recipe is empty: name a file, or one of those that `draftsmith recipes` lists.")
    source, argv = _where(path), [in_home(word) for word in argv]
    for word, after in pairwise((*argv, "")):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            value = value if equals else after
            # The parser would read a file of that name.
            if key in _WHOLE and value and not value.startswith("--") and not value.lstrip().startswith("{"):
                raise UserError(
                    f"{source}{key} is {shown(value)}, but it is a section: set its keys, as in --{key}.KEY VALUE."
                )
            _check_texts(value, key, source.removesuffix(": "))
    content: Any = {}
    if path is not None:
        read = read_yaml(find_file(path), "mend it, or name one of those that `draftsmith recipes` lists")
        if not isinstance(read, dict):
            raise UserError(
                f"The recipe {path} is not a mapping of keys: `draftsmith recipes eagle3/tiny` shows the form."
            )
        _check_texts(read, "", path)
        content = _tidy(source, in_home(read), get_type_hints(Recipe))
    method = _option(argv, "--method") or content.get("method", "eagle3")
    names = method_names()
    if method not in names:
        raise UserError(f"method is {shown(method)}: the drafters are {', '.join(names)}.")
    if {"-h", "--help"} & set(argv):
        print(recipe_parser(method, prog, description, options).format_help(), end="")
        raise SystemExit(0)
    parser = _parser_of(method, find_method(method).options_class, tuple(names), prog, description)
    if "head" in content:
        content |= _tidy(_where(path), {"head": content.pop("head")}, {"head": find_method(method).options_class})
    argv = _replacing(content, argv)
    texts = _texts_of_template(content.get("data", {}).get("template"), argv)  # the parser changes what it reads
    try:
        base = parser.parse_object(content) if content else parser.get_defaults()
        chosen = parser.parse_args(argv, namespace=base) if argv else base
        ready = parser.instantiate(chosen)
        keys = {f.name for f in fields(Recipe)}
        recipe = Recipe(**{key: value for key, value in vars(ready).items() if key in keys})
        template = {key: texts.get(key, value) for key, value in recipe.data.template.items()}
        return replace(recipe, data=replace(recipe.data, template=template))
    except (ParserError, ArgumentError) as error:
        raise UserError(f"{_where(path)}{_sentence(str(error), parser, options)}") from error
    except UserError as error:
        raise UserError(f"{_where(path)}{error}") from error


def _replacing(content: dict[str, Any], argv: list[str]) -> list[str]:
    """Return the words without lists of sections that a later word gives anew, and take those out of `content`: the parser would keep
    what is left out in an item from the one at its place."""
    for name in _ITEMS:
        places = [i for i, word in enumerate(argv) if word.partition("=")[0] == f"--{name}"]
        if places:
            section, _, key = name.partition(".")
            content.get(section, {}).pop(key, None)
        for i in reversed(places[:-1]):
            argv = argv[:i] + argv[i + 1 + ("=" not in argv[i]) :]
    return argv


def _texts_of_template(given: Any, argv: Sequence[str]) -> dict[str, str]:
    """Return the values of data.template, `given` in a file, that were written as texts: the parser takes these for YAML, and a quoted
    "off" for false."""
    written = {**given} if isinstance(given, dict) else {}
    for word, after in pairwise((*argv, "")):
        key, equals, value = word.removeprefix("--").partition("=")
        with suppress(MarkedYAMLError):
            read = parse_yaml(value if equals else after, key, "") if key.startswith("data.template") else None
            if key == "data.template" and isinstance(read, dict):
                written = read
            elif key.startswith("data.template."):
                written[key.removeprefix("data.template.")] = read
    return {key: value for key, value in written.items() if isinstance(value, str)}


def _tidy(where: str, content: dict[str, Any], hints: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Return what a recipe says, without sections that are empty. hints: the types of the keys. Raises UserError for a section
    that is none, and for a null that a key does not take."""
    kept = {}
    for key, value in content.items():
        name, hint = f"{group}{key}", hints.get(key)
        if is_dataclass(hint) and value is None:
            continue
        if is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(f"{where}{name} is {shown(value)}, but it is a section: indent its keys below.")
            kept[key] = _tidy(where, value, get_type_hints(hint), f"{name}.")
            continue
        if name == "train.precision" and value is False:
            value = "no"  # which YAML reads as false
        if value is None and hint not in (None, Any) and type(None) not in get_args(hint):
            raise UserError(f"{where}{name} is null, which it cannot be: leave the key out for its default.")
        if name in _ITEMS and isinstance(value, list) and (odd := [one for one in value if not isinstance(one, dict)]):
            raise UserError(f"{where}{_no_mapping(name, odd[0])}")
        kept[key] = value
    return kept


def _no_mapping(key: str, item: Any) -> str:
    return f"{key} holds {shown(item)}, which is no mapping: write {_EXAMPLES[key]}."


def _option(argv: list[str], name: str) -> str | None:
    """Return the value of a `--name value` or `--name=value` option, which is needed before parsing; the last, as of every key."""
    for i, word in reversed([*enumerate(argv)]):
        if word == name and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(name + "="):
            return word.split("=", 1)[1]
    return None


def _where(path: str | None) -> str:
    return "The options: " if path is None else f"The recipe {path} or its overrides: "


def _sentence(message: str, parser: ArgumentParser, options: Sequence[Option] = ()) -> str:
    """Keep what names the key and the reason, without the parser's words; name the key that a typo may have meant."""
    text = re.sub(r"Problem with given class_path '[\w.]+': ", "", " ".join(message.split()).rstrip("."))
    text = re.sub(r'Parser key "([\w.]+)": Parser key "([\w.]+)": Expected', r'Parser key "\1.\2": Expected', text)
    section = re.match(r'Parser key "([\w.]+)": Unable to load config \W(.*?)\W - ', text)
    if section:
        return (
            f"{section[1]} is {shown(section[2])}, but it is a section: set its keys, as in --{section[1]}.KEY VALUE."
        )
    mapping = re.fullmatch(r'Parser key "([\w.]+?)(?:\[\d+\])?": .*Expected a dot import path string: (.*)', text)
    if mapping and mapping[1] in _EXAMPLES:
        return _no_mapping(mapping[1], mapping[2])
    wrong = re.fullmatch(r'Parser key "([\w.]+)": Expected a (.+?)\. Got value: ?(.*)', text)
    wrong = wrong or re.fullmatch(r'Parser key "([\w.]+)": .*Subtypes: \[(.+?)\] Errors: .*Given value: ?(.*)', text)
    if wrong:
        key, kind, value = wrong.groups()
        kind = kind.replace(", <class 'NoneType'>", " or null")
        kind = re.sub(r"<class '(\w+)'>", lambda match: _KINDS.get(match[1], match[1]), kind)
        kind = re.sub(r"list\[(\w+)\]", lambda match: f"a list of {_PLURALS.get(match[1], match[1])}", kind)
        text = f"{key} is {shown(value)}, which is not {kind.replace('typing.Literal', 'one of ')}"
    item = re.match(rf"Parser key \"({'|'.join(_ITEMS)})(?:\[\d+\])?\".*?: .*?Option '([\w.]+)' is not accepted", text)
    if item:
        keys = [f.name for f in fields(_ITEMS[item[1]])]
        return (
            f"{item[1]} has no key {item[2][:MOST_SHOWN]}{did_you_mean(item[2], keys)}: its keys are {', '.join(keys)}."
        )
    group = re.fullmatch(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text)
    unknown = re.match(r"(?:unrecognized arguments: --|Option ')([\w.-]+)", text)
    if group or unknown:
        key = f"{group[1]}.{group[2]}" if group else unknown[1] if unknown else ""
        keys = [*(action.dest for action in parser._actions), *(one.name.removeprefix("--") for one in options)]
        inside = next((f" (did you mean {name}?)" for name in keys if name.endswith(f".{key}")), "")
        meant = did_you_mean(key, keys, cutoff=0.7) or inside
        command = f"`{parser.prog} --method {parser.get_default('method')} --help`"
        return f"there is no key {key[:MOST_SHOWN]}{meant}: {command} lists every key."
    return f"{text[:400]}; see --help for every key and its type."


def shipped_names() -> dict[str, str]:
    """Return what is installed by name, and how the comment at its top begins: up to the first colon, semicolon or full stop."""
    names = {}
    for path in sorted(FOLDER.glob("*/*.yaml")):
        lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        about = re.sub(r" \([^)]*\)", "", " ".join(line.strip("# ") for line in lines))
        names[path.relative_to(FOLDER).with_suffix("").as_posix()] = re.split(r"[.:;](?: |$)", about)[0]
    return names


def find_file(name: str) -> str:
    """Return the file of that name, else the installed one, whose name may begin with "recipes/" and lack its ending; a name that is
    neither comes back as it is."""
    inside = name.removeprefix("recipes/")
    if os.path.exists(name) or not inside or os.path.isabs(inside) or ".." in Path(inside).parts:
        return name
    return next((str(FOLDER / one) for one in (inside, f"{inside}.yaml") if os.path.isfile(FOLDER / one)), name)


def shipped_text(name: str) -> str:
    """Return what the installed file of that name holds. Raises UserError where there is none."""
    known = shipped_names()
    short = name.removeprefix("recipes/").removesuffix(".yaml")
    if short not in known:
        raise UserError(
            f"There is no recipe {one_line(name)}{did_you_mean(short, known)}: `draftsmith recipes` lists them."
        )
    return (FOLDER / f"{short}.yaml").read_text(encoding="utf-8")
