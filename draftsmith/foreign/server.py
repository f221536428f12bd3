"""An HTTP server that serves a model: asked for JSON, and a sentence where it refuses, is silent, or serves another model."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from draftsmith.errors import UserError, first_line, shown_path
from draftsmith.foreign.json import parse_json

MOST_BYTES = 1 << 24
SHORT, LONGEST = 30, 600
"""Seconds within which a server says what it serves, and within which it goes on with an answer."""


class ModelServer:
    """The server at `url`. option: what names it in a sentence, such as "--server".

    Raises UserError for what is no address.
    """

    def __init__(self, url: str, option: str) -> None:
        self.url, self._option = url.rstrip("/").removesuffix("/v1"), option
        if not re.fullmatch(r"https?://[^\s/@]+(/\S*)?", self.url):
            raise UserError(
                f"{option} is {shown_path(url)}: give the address of a server, such as http://localhost:8000."
            )

    def get(self, path: str, absent: Sequence[int] = ()) -> bytes:
        """Return what the server answers; nothing where its status is one of `absent`."""
        with self.explained(path):
            try:
                with urlopen(self.url + path, timeout=SHORT) as answer:
                    return answer.read(MOST_BYTES)
            except HTTPError as error:
                if error.code in absent:
                    return b""
                raise

    def ask(self, path: str) -> dict[str, Any]:
        """Return the object that the server answers."""
        return self.parse(self.get(path), path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the object that the server answers to `body`."""
        with self.explained(path), urlopen(self.request(path, body), timeout=LONGEST) as answer:
            text = answer.read(MOST_BYTES)
        return self.parse(text, path)

    def request(self, path: str, body: dict[str, Any]) -> Request:
        """Return the request that posts `body`."""
        return Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def parse(self, text: bytes, what: str) -> dict[str, Any]:
        """Return the object in a JSON text of the server's. what: names the text in the sentence."""
        remedy = "name the address of vLLM or of llama-server itself"
        value = parse_json(text, f"{self.url}: {what}", remedy)
        if not isinstance(value, dict):
            raise UserError(f"{self.url}: {what} is no JSON object: {remedy}.")
        return value

    def find_model(self, names: Sequence[str], remedy: str) -> str:
        """Return by which of its names the server is asked for the model called one of `names`. remedy: how the user names a model
        that is served under another one."""
        cards = self.ask("/v1/models").get("data")
        served: dict[str, str] = {}  # by the last part of a name, or of the path that the model was loaded from
        for card in cards if isinstance(cards, list) else ():
            if isinstance(card, dict) and isinstance(own := card.get("id"), str):
                served |= {_last(name): own for name in (card.get("root"), own) if isinstance(name, str)}
        found = next((served[_last(name)] for name in names if _last(name) in served), None)
        if found is None:
            shown = ", ".join(dict.fromkeys(shown_path(name) for name in served.values()))
            raise UserError(
                f"{self.url} serves {shown or 'no model'}, not {' or '.join(names)}: start it with the recipe's target; where that is the "
                f"same model under another name, {remedy}."
            )
        return found

    @contextmanager
    def explained(self, path: str) -> Iterator[None]:
        """Raise UserError where the server refuses `path` or does not answer."""
        try:
            yield
        except HTTPError as error:
            with error:
                said = " ".join(error.read(10_000).decode("utf-8", "replace").split())
            key = "it asks for a key, so start it without one: " if error.code in (401, 403) else ""
            raise UserError(f"{self.url} refuses {path} (status {error.code}): {key}it says {said[:300]!r}.") from error
        except (OSError, HTTPException, ValueError) as error:  # the last for a host that is none
            reason = getattr(error, "reason", None)
            why = first_line(reason if isinstance(reason, Exception) else error)
            raise UserError(
                f"{self.url}{path} does not answer ({why}): start the server, wait until it is ready, or correct {self._option}."
            ) from error


def _last(name: str) -> str:
    """Return what two names of the same model share: the last part, without its case and llama.cpp's ending."""
    return Path(name).name.lower().removesuffix(".gguf")
