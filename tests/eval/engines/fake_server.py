"""A server that answers as vLLM or llama-server does, with rounds of a known length and acceptance, and counters."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAMES = {
    "vLLM": {
        "generated": "vllm:generation_tokens_total",
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "prefix": "vllm:",
        "labels": '{engine="0",model_name="m"}',
    },
    "llama.cpp": {
        "generated": "llamacpp:tokens_predicted_total",
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
        "prefix": "llamacpp:",
        "labels": "",
    },
}


ABOUT = {"vLLM": "/version", "llama.cpp": "/props"}


@dataclass
class Engine:
    """kind: as in NAMES. k: drafted tokens a round. accepts: accepted tokens by round, over again. slots: rows that are answered at
    once, the others wait. longest: tokens of prompt and answer. others: tokens that it makes for others with every answer. merged: of
    so many rounds one is sent with the next, 0 for none. metrics, usage, versions: whether it shows counters,
    tokens with every chunk, and its version. running, joining: requests of others, from
    the start on, and from the first answer on. owner: of its model, as it says. reply: gives status and value of an answer in place of all of these. fault: what goes wrong with a chat: "refuses",
    "stalls", "hangs up", "silent" (no usage), "" nothing."""

    kind: str = "vLLM"
    k: int = 0
    accepts: tuple[int, ...] = (0,)
    slots: int = 64
    longest: int = 10_000
    others: int = 0
    merged: int = 0
    metrics: bool = True
    usage: bool = True
    running: int = 0
    joining: int = 0
    model: str = "models/target"
    owner: str = ""
    drafted: tuple[int, ...] = ()
    versions: bool = True
    reply: Callable[[dict[str, Any]], tuple[int, Any]] | None = None
    fault: Callable[[dict[str, Any]], str] | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"generated": 0, "rounds": 0, "drafted": 0, "accepted": 0})

    def rounds(self, tokens: int) -> list[tuple[int, int, int]]:
        """Return (tokens, drafted, accepted) of each round of an answer, after its first token."""
        found, known = [], 1
        while known < tokens:
            # llama-server drafts no more than the answer has room for.
            room = tokens - known - 1 if self.kind == "llama.cpp" else self.k
            drafted = min(room, self.drafted[len(found) % len(self.drafted)] if self.drafted else self.k)
            accepted = min(drafted, self.accepts[len(found) % len(self.accepts)])
            known += accepted + 1
            found.append((min(known, tokens), drafted, accepted))
        return found

    def page(self) -> str:
        """Return /metrics."""
        names = NAMES[self.kind]
        lines = {names["generated"]: self.counts["generated"], names["running"]: self.running, names["waiting"]: 0}
        if self.k or self.kind == "llama.cpp":
            lines |= {
                f"{names['prefix']}spec_decode_num_drafts_total": self.counts["rounds"],
                f"{names['prefix']}spec_decode_num_draft_tokens_total": self.counts["drafted"],
                f"{names['prefix']}spec_decode_num_accepted_tokens_total": self.counts["accepted"],
            }
        return "# HELP of counters\n" + "".join(f"{name}{names['labels']} {n:.1f}\n" for name, n in lines.items())


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        engine = self.server.engine
        pages: dict[str, Any] = {
            "/v1/models": {
                "object": "list",
                "data": [{"id": "served", "root": engine.model, "owned_by": engine.owner}],
            },
            "/version": {"version": "9.9"},
            "/props": {"build_info": "b9-abc"},
        }
        abouts = ("/props", "/version", "/get_server_info")
        if self.path in abouts and not (engine.versions and self.path == ABOUT[engine.kind]):
            self._send(404, "none")
        elif self.path == "/metrics":
            self._send(200 if engine.metrics else 501, engine.page() if engine.metrics else '{"error": "disabled"}')
        else:
            self._send(200, json.dumps(pages[self.path]))

    def do_POST(self) -> None:
        engine, asked = self.server.engine, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine.asked.append(asked)
        if engine.reply is not None:
            status, found = engine.reply(asked)
            self._send(status, json.dumps(found))
            return
        fault = engine.fault(asked) if engine.fault else ""
        if fault == "refuses":
            self._send(500, '{"error": "out of memory"}')
            return
        prompt = asked["prompt"] if "prompt" in asked else asked["messages"]
        if asked["model"] != "served" or engine.longest <= len(prompt):
            self._send(400, json.dumps({"error": {"message": "the prompt is longer than max_model_len"}}))
            return
        self.send_response(200)
        self.end_headers()
        if fault in ("stalls", "hangs up"):
            self._chunk({"choices": [{"delta": {"content": "a"}}]})
            self.server.closing.wait(60 if fault == "stalls" else 0)
            return
        with self.server.slots:
            self._answer(engine, min(asked["max_tokens"], engine.longest - len(prompt)))
        if fault != "silent" and (engine.kind == "vLLM" or "messages" in asked):
            self._chunk({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, engine: Engine, tokens: int) -> None:
        rounds = [(1, 0, 0), *engine.rounds(tokens)]
        drafted = accepted = before = 0
        text = {"text": "a", "delta": {"content": "a"}}
        for place, (known, more, kept) in enumerate(rounds):
            time.sleep(self.server.step)
            drafted, accepted = drafted + more, accepted + kept
            if engine.kind == "llama.cpp":
                for token in range(before + 1, known + 1):
                    counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
                    self._chunk({"choices": [text], "timings": {"predicted_n": token, **counts}})
            elif not engine.merged or not place or place % engine.merged or known == tokens:
                self._chunk({"choices": [text], "usage": {"completion_tokens": known}})
            before = known
        with self.server.lock:
            engine.counts["generated"] += tokens + engine.others
            engine.counts["rounds"] += len(rounds) - 1 if engine.k else 0
            engine.counts["drafted"] += drafted
            engine.counts["accepted"] += accepted
            engine.running = max(engine.running, engine.joining)

    def _chunk(self, value: dict[str, Any]) -> None:
        shown = value if self.server.engine.usage else {"choices": value["choices"]}
        self.wfile.write(f"data: {json.dumps(shown)}\n\n".encode())

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, engine: Engine, step: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine, self.step = engine, step
        self.slots, self.lock, self.closing = threading.Semaphore(engine.slots), threading.Lock(), threading.Event()


@contextmanager
def serving(engine: Engine, step: float = 0.0005) -> Iterator[str]:
    """Serve from a thread of this process; yield the address. step: seconds of a round."""
    server = _Server(engine, step)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
