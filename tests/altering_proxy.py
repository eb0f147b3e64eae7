"""Somebody between a device and its coordinator, who alters answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import urllib3

Alter = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def in_between(url: str, alter: Alter) -> Iterator[str]:
    """Somebody on the way, who alters the JSON of every answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {k: v for k, v in self.headers.items() if k != "Host"}
            answer = urllib3.request(self.command, url + self.path, body=body, headers=headers)
            data = answer.data
            if answer.headers.get("Content-Type") == "application/json":
                data = json.dumps(alter(json.loads(data))).encode()
            self.send_response(answer.status)
            for name in ("Content-Type", "ETag", "Content-Range"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
