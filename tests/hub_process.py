"""Runs code against a Hugging Face hub on this machine, in a process of its own: huggingface_hub reads its environment
when it is imported."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path


def run_with_hub(
    hub: type[http.server.BaseHTTPRequestHandler], code: str, arguments: Iterable[str], *, home: Path
) -> subprocess.CompletedProcess[str]:
    """Run `code`, which succeeds, with `sys.argv[1:]` as given and the cache in `home`. `hub` answers for the hub."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), hub)
    threading.Thread(target=server.serve_forever).start()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys; sys.path[:] = {sys.path!r}\n{code}", *arguments],
        env={**kept, "HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    server.shutdown()
    server.server_close()
    assert done.returncode == 0, done.stderr
    return done
