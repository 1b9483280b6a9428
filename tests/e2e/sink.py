"""The effect's target: an HTTP server that answers as told and remembers every call."""

import json
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Sink:
    """Counts POSTs per `Idempotency-Key`.

    The first call for a key in `busy` is answered 503 (as many as it says, if it is a dict of
    numbers), every call for one in `refused` 422 until it is mended, all others 200. Only a call
    answered 200 has taken effect.
    """

    def __init__(self, host="127.0.0.1", busy=(), refused=()):
        # A function in a container comes in through another interface.
        interface = "127.0.0.1" if host == "127.0.0.1" else "0.0.0.0"
        self.busy = dict(busy) if isinstance(busy, dict) else dict.fromkeys(busy, 1)
        self.refused = set(refused)
        self.calls = []  # (key, status, body, headers), as they arrive
        self.times = []  # seconds since the epoch, one per call
        self._seen = defaultdict(int)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((interface, 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}/effects"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, headers, body):
        key = headers.get("Idempotency-Key", "")
        with self._lock:
            self._seen[key] += 1
            if key in self.refused:
                status = 422
            elif self._seen[key] <= self.busy.get(key, 0):
                status = 503
            else:
                status = 200
            self.calls.append((key, status, body, headers))
            self.times.append(time.time())
        return status

    def mend(self, key):
        """From now on the key is no longer refused."""
        with self._lock:
            self.refused.discard(key)

    def calls_of(self, key):
        """Time and status of each call for a key."""
        with self._lock:
            return [(at, call[1]) for call, at in zip(self.calls, self.times) if call[0] == key]

    def effects(self):
        """The calls that took effect, in order."""
        with self._lock:
            return [(key, body) for key, status, body, _ in self.calls if status == 200]

    def _handler(self):
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # keep-alive, as any real target

            def do_POST(self):
                text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                try:
                    body = json.loads(text)
                except ValueError:
                    body = {"unreadable": text.decode(errors="replace")}
                status = sink.answer(self.headers, body)  # names in any case
                answer = json.dumps({"status": status}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        return Handler
