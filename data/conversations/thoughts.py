"""Think blocks in the texts of templates: empty ones, which a template forces, and the thoughts of answers, which it may drop."""

import re
from typing import Any

EMPTY_THINK = re.compile(r"\s*(<think>\s*)?</think>\s*|\s*<\|channel>thought\s*<channel\|>\s*")
"""An empty think block, whole or begun in the generation prompt, or Gemma 4's: the template writes it, not the target."""
OPEN_THINK = re.compile(r"^\s*<think>\s*")
OPENS, CLOSED = ("<think>", "<|channel>thought"), ("</think>", "<channel|>")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
BLOCK = "<think>\n"


def thought_of(message: dict[str, Any], block: str) -> tuple[str, str]:
    """Return the thought of an answer up to the end of the think `block` that its prompt opens, and what is said after it; "" where
    there is none."""
    content, thought = message["content"], message.get("reasoning_content", "").strip()
    if thought:  # in lines of its own where the block begins with one
        return f"{thought}\n</think>\n\n" if block.endswith("\n") else f"{thought}</think>", content
    thought, close, said = content.partition("</think>")
    return (thought + close, said) if close else ("", content)


def after_thought(thought: str, said: str, bare: str) -> str | None:
    """Put a thought before `bare`, the answer as a template renders it without; None where `bare` does not begin with `said`."""
    kept = said if bare.startswith(said) else said.strip()
    if not bare.startswith(kept):
        return None
    return thought + (said if kept == said else said.rstrip()) + bare[len(kept) :]


def lacks_thought(message: dict[str, Any], text: str) -> bool:
    """Return whether the thought of an answer is not in its text, where what is said may hold the same words."""
    content, thought = message["content"], (message.get("reasoning_content") or "").strip()
    if thought:
        return text.count(thought) <= content.count(thought)
    within = _THOUGHT.match(content)
    return within is not None and within[1].strip() not in text
