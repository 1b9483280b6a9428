"""ministack as a process of its own, on a port that nobody else uses."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path


class Ministack:
    def __init__(self, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._scratch = tempfile.TemporaryDirectory(prefix="e2e-")
        environment = {
            # Nothing else of ours: functions inherit it, and a proxy or credentials set
            # for this shell are none of theirs.
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            "GATEWAY_PORT": str(port),
            "BIND_HOST": "127.0.0.1",
            # Handed on to the functions: without it they would look for AWS.
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            # Unpacked functions go with the process.
            "TMPDIR": self._scratch.name,
        }
        # The tools live beside the interpreter that runs this.
        command = Path(sys.executable).parent / "ministack"
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [command],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Its own group, so that its functions end with it.
                start_new_session=True,
            )

    def ready(self):
        if self._process.poll() is not None:
            raise RuntimeError(f"ministack ended with {self._process.returncode}; see {self.log}")
        try:
            with urllib.request.urlopen(f"{self.url}/_ministack/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self):
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                pass
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                pass
        self._scratch.cleanup()
