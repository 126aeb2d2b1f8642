"""A program that uses LLM, with real processes and the built-in model, as people write it: without a main guard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fake_command import ENVIRON

SCRIPT = """
print("begin")
import asyncio, os, signal, sys, threading
import nvcli
assert not {"msgspec", "torch", "transformers"} & set(sys.modules)  # `import nvcli` takes no time
from nvcli import LLM
assert "torch" not in sys.modules
assert nvcli.LLM is LLM
threading.Thread(target=__import__, args=("transformers",)).start()  # as an LLM does whose loading was interrupted

async def in_a_notebook():  # an event loop runs there
    return LLM("demo", device="cpu", kv_cache_memory="64MiB", max_num_seqs=8, sampling={"temperature": 0})

llm = asyncio.run(in_a_notebook())
rows = ["What is 37 + 58?\\n", [{"role": "user", "content": "What is 8 * 63?"}], {"prompt": "x" * 9999, "k": 1}]
for _ in range(2):
    print([answer.error.type if answer.error else answer.text for answer in llm.generate(rows, order="input")])
print("".join(llm.stream([{"role": "user", "content": "Count from 9 to 14."}])))

def children():
    return {int(pid) for task in os.listdir("/proc/self/task") for pid in
            open(f"/proc/self/task/{task}/children").read().split()}

(engine,) = (pid for pid in children() if b"nvcli.engine." in open(f"/proc/{pid}/cmdline", "rb").read())
made = []
thread = threading.Thread(target=lambda: made.append(LLM("demo", device="cpu", kv_cache_memory="64MiB")))
thread.start()
thread.join()
(other,) = made
print(sorted(answer.text for answer in other.generate(["What is 1 + 2?\\n", "What is 3 + 4?\\n"])))

print(len(children()))
os.kill(engine, signal.SIGKILL)
try:
    list(llm.generate(["hello"]))
except nvcli.errors.WorkerError as error:
    print(error)
rest = other.generate(["Count from 1 to 90."] * 50)  # nobody closes it: the program ends
print(next(rest).error)
"""


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(SCRIPT)
    environ = {**ENVIRON, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, env=environ, timeout=120, check=False, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[:5] == [
        "begin",  # once: no process runs the script again
        *["['95', '504', 'prompt_too_long']"] * 2,
        "9 10 11 12 13 14",
        "['3', '7']",
    ]
    assert lines[5] == "3"  # the engines of both and what they share
    assert "the engine" in lines[6]
    assert "was killed by SIGKILL; it was at: running" in lines[6]
    assert lines[7:] == ["None"]
    left = [
        pid
        for pid in os.listdir("/proc")
        if pid.isdigit() and str(tmp_path).encode() in _environ(Path("/proc", pid, "environ"))
    ]
    assert left == []


def _environ(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
