"""Renew the reference of docs/api.md from the docstrings: python -m scripts.bench.pages.api"""

import inspect
import re
from pathlib import Path
from textwrap import indent

import draftsmith

PAGE = Path(__file__).resolve().parents[3] / "docs" / "api.md"
BLOCK = re.compile(r"(?<=<!-- reference -->\n).*?(?=<!-- end -->)", re.DOTALL)


def reference() -> str:
    """Return signature and docstring of every public function, in Markdown."""
    public = {name: getattr(draftsmith, name) for name in draftsmith.__all__}
    functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
    shown = {name: f"{name}({_parameters(one)})\n\n{inspect.getdoc(one)}\n" for name, one in functions.items()}
    return "\n".join(f"### {name}\n\n{indent(text, '    ')}" for name, text in shown.items())


def _parameters(function: object) -> str:
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    plain = [str(one.replace(annotation=one.empty)) for one in found]
    named = [one.kind is one.KEYWORD_ONLY for one in found]
    return ", ".join([*plain[: named.index(True)], "*", *plain[named.index(True) :]] if True in named else plain)


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: reference(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
