"""The target's tokenizer and chat template: loading and checking them, rendering messages and prompts."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftsmith.data.conversations.day import dated
from draftsmith.data.conversations.left_out import Refusals, left_out, warn_left_out
from draftsmith.data.conversations.load import Conversation
from draftsmith.errors import UserError, did_you_mean, first_line
from draftsmith.foreign.code import foreign_code, reason_of, try_out, why_offline
from draftsmith.foreign.text import is_text, read_object, read_text
from draftsmith.target.gguf_file import is_gguf, model_folder

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None

_PARSER = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
_AT_ONCE = 2**16
"""Characters of a text that are always tokenized together."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""The tag that transformers adds to the language."""

_TOKENIZER_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)


def load_tokenizer(
    path: str, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a target (a folder, a Hub name or a GGUF file); UserError where it or its chat template is missing.

    chat_template: a file with the template to take in place of the tokenizer's own.
    """
    tokenizer = read_tokenizer(path, trust_remote_code)
    if chat_template is not None:
        remedy = "give data.chat_template a text file with a chat template"
        tokenizer.chat_template = read_text(Path(chat_template).expanduser(), remedy)
        if not tokenizer.chat_template.strip():
            raise UserError(f"{chat_template} is empty: {remedy}.")
    template = tokenizer.chat_template
    if not template:
        raise UserError(
            f"The tokenizer in {path} has no chat template: name a file with one in data.chat_template, or use the "
            "instruction-tuned model of the same family."
        )
    if not all(isinstance(text, str) for text in (template.values() if isinstance(template, dict) else [template])):
        raise UserError(f"The chat template of {path} is no text: write the template itself into chat_template.jinja.")
    # A template that cannot render one question, or leaves it out, is refused. It is tried under limits of time and
    # memory.
    question = [{"role": "user", "content": "Hello"}]

    def asked() -> str:
        read = as_read(tokenizer, question)
        return str(tokenizer.apply_chat_template(read, tokenize=False, add_generation_prompt=True))

    tried = try_out(asked)
    if tried is not None:
        raise UserError(
            f"The {template_name(tokenizer)} cannot render a single question ({first_line(ValueError(tried))}): mend the "
            "template, or fetch that of the model again."
        )
    if question[0]["content"] not in asked():
        raise UserError(
            f"The {template_name(tokenizer)} leaves out what a user says: name one that writes it in data.chat_template."
        )
    return tokenizer


def read_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, by a Hub name or from a GGUF file, with a chat template or without; UserError where it is
    missing."""
    if is_gguf(path):
        tokenizer = read_tokenizer(str(model_folder(path)))
        tokenizer.name_or_path = path  # what messages say, not the cache
        return tokenizer
    folder = Path(path).expanduser()
    if (folder.is_absolute() or path.startswith(".")) and not folder.is_dir():
        raise UserError(f"There is no folder {path} to load a tokenizer from.")
    path, remedy = (
        (str(folder), "fetch the whole model") if folder.is_dir() else (path, "check the name and the network")
    )
    if not folder.is_dir():
        why_offline()
    for file in (folder / name for name in _TOKENIZER_JSON if folder.is_dir()):
        if file.exists() or file.is_symlink():
            read_object(file, f"fetch the tokenizer of {path} again")
    files = "its files (tokenizer.json, or tokenizer.model, and tokenizer_config.json) are missing or damaged"
    with foreign_code(f"No tokenizer could be loaded from {path}, as {files}", remedy):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        vocab = tokenizer.get_vocab()
    if not vocab:
        raise UserError(f"The tokenizer in {path} is empty: its vocabulary files are missing.")
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer whose largest id (added tokens included) has no row in the target's embedding."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise UserError(
            f"The tokenizer {tokenizer.name_or_path} does not belong to this target: its token {token!r} has the id "
            f"{largest}, but the target's vocabulary has {vocab_size} entries; load the target's own tokenizer."
        )


def check_template_keys(tokenizer: PreTrainedTokenizerBase, keys: Mapping[str, Any]) -> None:
    """Refuse arguments that the chat template never reads, which would change nothing."""
    templates = tokenizer.chat_template
    read: set[str] = set()
    for text in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            read |= jinja2.meta.find_undeclared_variables(_PARSER.parse(_GENERATION.sub("", text)))
        except jinja2.TemplateError:
            return  # which rendering explains
    if unread := sorted(set(keys) - read):
        raise UserError(
            f"data.template names {unread[0]!r}, which the chat template of {tokenizer.name_or_path} does not read"
            f"{did_you_mean(unread[0], read)}: correct it, or leave it out."
        )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools = None,
    *,
    most: int | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """Return the token ids of `messages` with the generation prompt, as a serving engine renders a request. most: as of `shorten`."""
    text = render_text(tokenizer, messages, tools, generation_prompt=True, **template_kwargs)
    return encode(tokenizer, shorten(tokenizer, text, most))


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the turn to answer: the token ids of its history with the generation prompt, and the most tokens of the
    answer."""

    conversation: Conversation
    ids: tuple[int, ...]
    max_new_tokens: int


def prepare_prompts(
    tokenizer: Any,
    conversations: Sequence[Conversation],
    *,
    max_new_tokens: Callable[[str], int],
    max_length: int,
    template: dict[str, Any] | None = None,
    limit: str = "data.max_length and the target allow: raise data.max_length or give shorter prompts",
    refusals: Refusals | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> list[Prompt]:
    """Render the history of each conversation up to the last turn that is not the assistant's.

    Prompts that leave no space for an answer within `max_length` tokens are left out. max_new_tokens: by slice. template:
    arguments of the chat template. limit: what sets `max_length` and how to raise it, for the UserError where no prompt
    is left. refusals: what becomes of a conversation that cannot be rendered, an error by default. warn: called with each warning about the data set.
    """
    prompts, lost, refusals = [], dict[str, list[str]](), refusals or Refusals()
    for conversation in conversations:
        turns, tools = conversation.prompt(), conversation.tools
        render: Callable[..., str] = partial(render_text, tokenizer, name=conversation.id, **(template or {}))
        with refusals.of(conversation.id):
            text = render(turns, tools, generation_prompt=True)
            for what in left_out(replace(conversation, messages=turns), render, template_name(tokenizer)):
                lost.setdefault(what, []).append(conversation.id)
            ids = encode(tokenizer, shorten(tokenizer, text, max_length))
            left = min(max_new_tokens(conversation.slice), max_length - len(ids))
            if left > 0:
                prompts.append(Prompt(conversation, tuple(ids), left))
    refusals.warn(warn, len(conversations))
    if conversations and not prompts:
        raise UserError(f"No prompt leaves room for an answer within the {max_length} tokens that {limit}.")
    warn_left_out(warn, template_name(tokenizer), lost)
    return prompts


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools = None,
    *,
    generation_prompt: bool,
    name: str = "",
    **template_kwargs: Any,
) -> str:
    """Return the text that the chat template makes. Raises UserError, naming role and sample, where it refuses."""
    given = list(tools) if tools else None
    arguments: dict[str, Any] = {"tools": given, "add_generation_prompt": generation_prompt, **template_kwargs}
    try:
        arguments = dated(tokenizer, given) | arguments
        text = tokenizer.apply_chat_template(as_read(tokenizer, messages), tokenize=False, **arguments)
    except Exception as error:  # whatever a template does: raise_exception(), arithmetic, a missing content
        where = f"sample {name}" if name else "these messages"
        raise UserError(
            f"The {template_name(tokenizer)} does not accept {where}: "
            f"{_role_at_fault(tokenizer, messages, arguments)} (the template says: {reason_of(error)})."
        ) from error
    if not text.strip() or not is_text(text):
        what = "half a surrogate pair" if text.strip() else "nothing"
        raise UserError(
            f"The {template_name(tokenizer)} makes {what} of {name or 'these messages'}: mend the template."
        )
    return text


def as_read(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[dict[str, Any]]:
    """Return messages as the template reads them. Contents are text; a template that reads no text gets lists of parts, as engines
    give it."""
    if not _reads_parts(tokenizer, str(tokenizer.chat_template)):
        return list(messages)
    return [{**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else []} for m in messages]


@lru_cache(maxsize=4)
def _reads_parts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether a template (of a tokenizer, whose template may change) writes a question and its answer only where they are lists
    of parts, as templates for images do."""
    said = ("qz0zq", "qz1zq")

    def written(content: Callable[[str], Any]) -> bool:
        turns = [
            {"role": role, "content": content(text)} for role, text in zip(("user", "assistant"), said, strict=True)
        ]
        try:
            with foreign_code("the template", "mend it"):
                text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except UserError:
            return False
        return all(word in text for word in said) and "'type'" not in text

    return not written(str) and written(lambda text: [{"type": "text", "text": text}])


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of a chat template in errors."""
    return f"chat template of {tokenizer.name_or_path}" if tokenizer.name_or_path else "chat template"


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of rendered text; the template has already written every special token."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def shorten(tokenizer: PreTrainedTokenizerBase, text: str, most: int | None) -> str:
    """Cut a text that is far longer than `most` tokens, since tokenizing takes 200 times its size in memory.

    What is left has more than twice as many tokens, so that its first `most` are those of the whole text.
    """
    end = len(text) if most is None else max(16 * most, _AT_ONCE)  # characters; prose has four of them in a token
    while end < len(text) and most is not None:
        if len(encode(tokenizer, text[:end])) > 2 * most:
            return text[:end]
        end *= 4
    return text


def _role_at_fault(tokenizer: PreTrainedTokenizerBase, messages: Messages, arguments: dict[str, Any]) -> str:
    """Find what the template renders without: all calls of a turn but one, or one role; else list the order of the roles."""
    roles, without = [message["role"] for message in messages], dict[str, Messages]()
    one = "it cannot take several calls in one turn; remove the sample, or name a template that takes them in data.chat_template"
    without[one] = [{**m, "tool_calls": m["tool_calls"][:1]} if m.get("tool_calls") else m for m in messages]
    for role in sorted(set(roles) - {"user", "assistant"}):
        # Without the results of tools, the calls have no place either.
        rest = [m for m in messages if m["role"] != role and not (role == "tool" and m.get("tool_calls"))]
        without[f"it cannot take messages of role '{role}'; remove them or move their text into a user message"] = rest
    for what, kept in without.items():
        with suppress(UserError), foreign_code("the template", "mend it"):
            if kept and kept != [*messages]:
                tokenizer.apply_chat_template(as_read(tokenizer, kept), tokenize=False, **arguments)
                return what
    return f"it cannot take the roles in this order: {', '.join(roles[:8])}{', ...' if len(roles) > 8 else ''}"
