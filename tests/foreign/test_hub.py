"""The Hub is online once it has answered, and where it does not answer nothing waits for it twice."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from draftsmith.cli.doctor import check_hub
from draftsmith.data.conversations.load import load_conversations
from draftsmith.data.conversations.templates import load_tokenizer
from draftsmith.errors import UserError
from draftsmith.foreign.code import why_offline
from draftsmith.target.gguf_file import open_gguf
from draftsmith.target.pretrained import load_config, weights_directory
from tests.foreign.hostile import answering, head


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing forbids the network, and nobody has asked."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    why_offline.cache_clear()
    yield
    why_offline.cache_clear()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(lambda path: []) as url:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "503 Busy"])
def test_the_hub_is_online_when_it_answers(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(lambda path: [head("Content-Length: 0", status=status)]) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        assert why_offline() is None
        check = next(check_hub())
    assert (check.state, check.detail.split(";")[0]) == ("ok", "online")
    assert not constants.HF_HUB_OFFLINE


def test_doctor_says_that_the_hub_does_not_answer(nowhere: None) -> None:
    check = next(check_hub())
    assert check.state == "note"
    assert check.detail.startswith("does not answer (")
    assert "mend the network" in check.fix


ASKING: dict[str, Callable[[], object]] = {
    "config": lambda: load_config("owner/model"),
    "weights": lambda: weights_directory("owner/model"),
    "tokenizer": lambda: load_tokenizer("owner/model"),
    "gguf": lambda: open_gguf("owner/model/file.gguf"),
    "data": lambda: load_conversations(["owner/data"]),
}


@pytest.mark.parametrize("what", ASKING)
def test_without_a_network_a_name_is_refused_at_once(
    what: str, nowhere: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    import datasets  # noqa: F401 - whose import takes seconds

    started = time.monotonic()
    with pytest.raises(UserError, match=r"owner/.*network"):
        ASKING[what]()
    assert time.monotonic() - started < 8, "tried once, not six times in 20 seconds"
