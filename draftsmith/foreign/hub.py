"""The Hugging Face Hub: whether it answers, asked once, before libraries ask it again and again."""

from functools import cache

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from draftsmith.errors import first_line

_SECONDS = 5


@cache
def why_offline() -> str | None:
    """Return why the Hub does not answer, None where it does. Once it does not, libraries take what is in the cache at once, as with
    HF_HUB_OFFLINE=1; left to themselves they would try for 20 seconds, for each file anew."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # noqa: BLE001 - whatever a network and its client do, there was no answer
        constants.HF_HUB_OFFLINE = True
        return first_line(error)
    return None
