"""The command as a user runs it: exit codes, standard output, and what is not imported for a quick answer."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import nvcli
from fake_command import ENVIRON, NvcliHere, nvcli_command, run_nvcli
from nvcli.cli.main import app
from nvcli.cli.messages import say_error
from warm_process import WarmPopen

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def write_rows(path: Path, count: int, *extra: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(count)) + "".join(extra))
    return path


def test_help_and_version(tmp_path: Path) -> None:
    result = run_nvcli("--version", cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert (result.returncode, lines[0]) == (0, f"nvcli {nvcli.__version__}")
    assert [line.split()[0] for line in lines] == ["nvcli", "Python", "torch", "triton"]
    result = run_nvcli("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "generate" in result.stdout
    result = run_nvcli("generate", "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert "Examples:" in result.stdout
    assert "Exit codes:" in result.stdout
    assert "Rows and files:\n" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_plain_and_whole(command: str) -> None:
    """Options stand in groups, with values in words; the list of commands is not cut short."""
    runner = CliRunner()
    shown = runner.invoke(app, [command, "--help"]).output
    assert ("\nModel and GPUs:\n" in shown) == (command not in ("models", "show", "merge")), "those ask for no model"
    assert "\nConfiguration and help:\n" in shown or command == "show"  # which has no groups
    assert "range>" not in shown
    assert "<" not in shown.partition("Configuration and help:")[2]
    listed = runner.invoke(app, ["--help"]).output.partition("Commands:")[2]
    assert f"  {command} " in listed
    assert "..." not in listed


def test_everyday_flags_reach_the_engine(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 2)
    flags = "-n 2 --max-tokens 1 --temperature 0 --top-p 0.5 --top-k 3 --seed 1 --max-num-seqs 2 --max-model-len 50"
    result = run_nvcli(
        *("generate", "in.jsonl", "-m", str(model_folder), *flags.split(), "--stop", "x", "--stop", "y"),
        *("--dtype", "float32", "--gpu-memory-utilization", "0.5", "--hf-overrides", '{"max_position_embeddings": 64}'),
        *("--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "1"),
        *("--frequency-penalty", "-1", "--ignore-eos"),
        cwd=tmp_path,
        fakes="",
    )
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "in.out.jsonl").read_text().splitlines()]
    assert [[choice["text"] for choice in row["choices"]] for row in rows] == [["0", "0"], ["1", "1"]]


def test_errors_are_red_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, shown in ((Terminal(), "\x1b[31m\x1b[1merror:\x1b[0m"), (io.StringIO(), "error:")):
        monkeypatch.setattr(sys, "stderr", stream)
        say_error("no")
        assert stream.getvalue() == f"nvcli: {shown} no\n"


QUICK = (
    ["--help"],
    ["--version"],
    ["doctor", "--help"],
    ["models"],
    ["generate", "--help"],
    ["generate", "in.jsonl"],
    ["generate", "no.jsonl", "-m", "demo"],
    ["check", "no.jsonl", "-m", "demo"],
    ["show", "no.jsonl"],
)


def test_quick_answers_import_nothing_heavy(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 1)
    script = tmp_path / "probe.py"
    script.write_text(
        "import sys\n"
        "from nvcli.cli import main as cli\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'rich', 'numpy', 'huggingface_hub', 'safetensors'}\n"
        "def leave(code, watch):\n"
        "    print('heavy:', sys.argv, sorted(heavy & sys.modules.keys()), file=sys.stderr, flush=True)\n"
        "cli._exit = leave\n"
        f"for arguments in {QUICK!r}:\n"
        "    sys.argv[1:] = arguments\n"
        "    cli.main()\n"
    )
    command = [sys.executable, str(script)]
    result = subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, check=False)
    found = [line for line in result.stderr.splitlines() if line.startswith("heavy:")]
    assert len(found) == len(QUICK), result.stderr
    assert [line for line in found if not line.endswith(" []")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "nvcli: error: no INPUT: name a file of rows"),
        (["generate", "in.jsonl", "--nonsense"], "--nonsense"),
        (["generate", "in.jsonl", "-m", "demo", "--order", "random"], '--order random: `job.order` is "random"'),
        (["generate", "in.jsonl", "-m", "demo", "--limit", "0"], "--limit 0: allowed: an integer of at least 1"),
        (["nonsense"], "nvcli: error: no such command 'nonsense'"),
        (["bench", "-m", "demo", "--temperature", "hot"], "--temperature hot: allowed: a number from 0 to 100"),
        (
            ["generate", "in.jsonl", "-m", "demo", "--top-p", "x"],
            '--top-p x: `sampling.top_p` is "x"; allowed: a number',
        ),
        (["generate", "in.jsonl", "-m", "demo", "--progress", "no"], "--progress no: allowed: auto, bar, none, plain"),
        (["generate", "in.jsonl", "-m", "demo", "--max-errors", "x"], '--max-errors x: `job.max_errors` is "x"'),
        (["generate", "in.jsonl"], "no model given"),
        (["generate", "in.jsonl", "-c", "no.yaml"], "no.yaml"),
        (["generate", "in.jsonl", "-c", "bad.yaml"], "bad.yaml:2: unknown key `max_seqs`"),
        (["generate", "in.jsonl", "-m", "demo", "--set", "dtype=fp16"], "--set dtype=fp16: `dtype`"),
        (["generate", "in.jsonl", "-m", "demo", "--tp", "0"], "--tp 0"),
        (["generate", "no.jsonl", "-m", "demo"], "there is no input file no.jsonl"),
        (["generate", "in.jsonl", "-m", "demo", "-o", "no/out.jsonl"], "mkdir -p no"),
        (["generate", "in.jsonl", "-m", "demo", "-o", "in.jsonl"], "also an input"),
        (["generate", "in.jsonl", "-m", "demo", "-o", "old.jsonl"], "--overwrite"),
        (["generate", "in.jsonl", "old.jsonl", "-m", "demo"], "-o FILE"),
        (
            ["generate", "in.jsonl", "-m", "demo", "--report", "in.out.jsonl.manifest.json"],
            "is a file of the job itself",
        ),
        (
            ["generate", "in.jsonl", "-m", "demo", "--progress-file", "r.json", "--report", "r.json"],
            "--report r.json: r.json is a file of the job itself",
        ),
        (["generate", "in.jsonl", "-m", "demo", "-v", "-q"], "--verbose and --quiet exclude each other"),
        (["generate", "in.jsonl", "-m"], "option '-m' requires an argument\n  see: nvcli generate --help"),
        (["bench", "-m", "demo", "--input-len", "9:1"], "--input-len 9:1: allowed: a number, or two"),
        (["bench", "--shape", "x"], "--shape x: unknown; known: "),
        (["bench", "-m", "demo", "--shared-prefix", "99999999999"], "do not fit max_model_len"),
        (["bench", "-m", "demo", "--seed", "9223372036854775808"], "--seed"),
        (["generate", "in.jsonl", "-m", "demo", "--progress-file", "./in.jsonl"], "is a file of the job itself"),
        (["generate", "in.jsonl", "-m", "demo", "--progress-file", "in.out.jsonl"], "is a file of the job itself"),
        (["generate", "in.jsonl", "-m", "./nowhere"], "nowhere"),
        (
            ["generate", "in.jsonl", "-m", "demo", "--chat-template", "no.jinja"],
            "no.jinja cannot be read: no such file",
        ),
        (["generate", "in.jsonl", "-m", "demo", "--chat-template-kwargs", "{"], "expected a JSON object in quotes"),
        (
            ["generate", "in.jsonl", "-m", "demo", "--prompt-template", "{}"],
            "--prompt-template {}: `job.prompt_template`",
        ),
        (["generate", "in.jsonl", "-m", "model", "--set", "max_model_len=100"], "`max_model_len` is 100"),
        (["generate", "in.jsonl", "-m", "model", "--tp", "3"], "tensor_parallel_size 3"),
        (["generate", "in.jsonl", "-m", "model", "--ep"], "`enable_expert_parallel` (--ep) is true, and this model"),
        (
            ["generate", "in.jsonl", "-m", "demo", "--attention-dp", "--tp", "2", "--pp", "2"],
            "(--attention-dp) is true, which does not work together with this: pipeline_parallel_size (--pp) is 2",
        ),
        (["generate", "in.jsonl", "-m", "demo", "--pp", "0"], "--pp 0: `pipeline_parallel_size` is 0"),
        (["generate", "in.jsonl", "-m", "demo", "--pp", "8"], "(--pp) is 8, and this model has 7 layers"),
    ],
)
def test_mistakes_end_with_code_2_and_a_line_that_names_them(
    tmp_path: Path,
    model_folder: Path,
    arguments: list[str],
    message: str,
    nvcli_here: NvcliHere,
) -> None:
    write_rows(tmp_path / "in.jsonl", 1)
    (tmp_path / "old.jsonl").write_text("precious")
    (tmp_path / "bad.yaml").write_text("model: demo\nmax_seqs: 3\n")
    (tmp_path / "model").symlink_to(model_folder)
    result = nvcli_here(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("nvcli: error: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert (tmp_path / "in.jsonl").read_text() == '{"prompt": "p0"}\n'
    assert (tmp_path / "old.jsonl").read_text() == "precious"


def test_a_job_from_file_to_file(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 5)
    (tmp_path / "nvcli.yaml").write_text(f"model: {model_folder}\ndevice: cpu\n")
    result = run_nvcli("generate", "in.jsonl", "--order", "input", cwd=tmp_path, fakes="")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    rows = [json.loads(line) for line in (tmp_path / "in.out.jsonl").read_text().splitlines()]
    assert [row["choices"][0]["text"] for row in rows] == ["0p", "1p", "2p", "3p", "4p"]
    assert "using the configuration in nvcli.yaml" in result.stderr
    assert "5 of 5 rows answered" in result.stderr
    again = run_nvcli("generate", "in.jsonl", cwd=tmp_path, fakes="")
    assert again.returncode == 2
    assert "  job.order: input → completion\n" in again.stderr
    assert "--overwrite" in again.stderr
    again = run_nvcli("generate", "in.jsonl", "--order", "input", cwd=tmp_path, fakes="")
    assert again.returncode == 0, again.stderr
    assert "is complete: 5 of 5 rows answered" in again.stderr


def test_rows_with_errors_make_code_1(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 3, "not json\n")
    result = run_nvcli("generate", "in.jsonl", "-m", str(model_folder), cwd=tmp_path, fakes="")
    assert result.returncode == 1, result.stderr
    assert "3 of 4 rows answered" in result.stderr
    assert "invalid_json 1" in result.stderr


def test_from_pipe_to_pipe_only_results_on_standard_output(tmp_path: Path, model_folder: Path) -> None:
    noisy = "on_poll=lambda: (print('chatter'), os.write(1, b'chatter'))"
    result = run_nvcli("generate", "-", "-m", str(model_folder), cwd=tmp_path, fakes=noisy, stdin='{"prompt": "ab"}\n')
    assert result.returncode == 0, result.stderr
    assert [json.loads(line)["choices"][0]["text"] for line in result.stdout.splitlines()] == ["ba"]


def test_a_dead_engine_makes_code_3(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 2000)
    result = run_nvcli("generate", "in.jsonl", "-m", str(model_folder), cwd=tmp_path, fakes="dies_after_polls=3")
    assert result.returncode == 3, result.stderr
    assert "rank 0" in result.stderr
    assert "continue with:\n" in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_makes_code_130(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 2000)
    command = nvcli_command(
        "generate", "in.jsonl", "-m", str(model_folder), cwd=tmp_path, fakes="polls_until_ready=10**9"
    )
    process = WarmPopen(command, cwd=tmp_path, env=ENVIRON, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "in.out.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    assert "Traceback" not in stderr


def test_ctrl_c_while_the_command_is_loaded_shows_no_traceback() -> None:
    script = """
import os, signal, sys, types
class Loading(types.ModuleType):
    def __getattr__(self, name): os.kill(os.getpid(), signal.SIGINT)
sys.modules["typer"] = Loading("typer")
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever these tests were started with
from nvcli.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=ENVIRON, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_ctrl_c_before_the_job_begins_is_no_failure(tmp_path: Path, name: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    script = """
import os, signal, sys
from nvcli.job.run import resolve
def resolve_model(name, **options):
    try:
        os.kill(os.getpid(), signal.NAME)
    except Exception:
        raise AssertionError("a library took it for an error")
resolve.resolve_model = resolve_model
sys.argv = ["nvcli", "generate", "in.jsonl", "-m", "demo", "--progress-file", "progress.json"]
from nvcli.cli.main import main
main()
"""
    command = [sys.executable, "-c", script.replace("NAME", name)]
    done = subprocess.run(command, capture_output=True, env=ENVIRON, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    status = json.loads((tmp_path / "progress.json").read_text())
    assert (status["state"], status["message"]) == ("interrupted", None)


def test_ctrl_c_while_standard_input_is_waited_for(tmp_path: Path, model_folder: Path) -> None:
    command = nvcli_command("generate", "-", "-o", "out.jsonl", "-m", str(model_folder), cwd=tmp_path, fakes="")
    process = WarmPopen(command, cwd=tmp_path, env=ENVIRON, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write('{"prompt": "ab"}\n')
        process.stdin.flush()
        # What becomes of the prompt is said when the row comes, before the model is ready or after.
        assert any("is ready" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        stderr = process.stderr.read()
        process.stdin.close()
        process.stderr.close()
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "Fatal" not in stderr


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", ">&-", "<&- >&- 2>&-", "2>&1 | true"])
def test_messages_that_nobody_reads_do_not_end_a_run(tmp_path: Path, model_folder: Path, redirection: str) -> None:
    write_rows(tmp_path / "in.jsonl", 5)
    command = nvcli_command("generate", "in.jsonl", "-m", str(model_folder), cwd=tmp_path, fakes="")
    script = f"set -o pipefail; {shlex.join(command)} {redirection}"
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=ENVIRON, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert b"Traceback" not in result.stderr
    assert len((tmp_path / "in.out.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("arguments", ["--version", "profile-memory -m demo --dry-run --gpu-memory 8GiB"])
def test_results_that_cannot_be_printed_are_an_error(tmp_path: Path, arguments: str) -> None:
    command = nvcli_command(*arguments.split(), cwd=tmp_path)
    script = f"{shlex.join(command)} >/dev/full"
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=ENVIRON, capture_output=True, timeout=120)
    assert (result.returncode, result.stderr) == (
        3,
        b"nvcli: error: standard output cannot be written: No space left on device\n",
    )


def test_a_reader_that_leaves_is_no_verdict(tmp_path: Path) -> None:
    """Exit code 1 would mean that some rows cannot be answered."""
    write_rows(tmp_path / "in.jsonl", 5)
    script = f"set -o pipefail; {shlex.join(nvcli_command('check', 'in.jsonl', '-m', 'demo', cwd=tmp_path))} | true"
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=ENVIRON, capture_output=True, timeout=120)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("encoding", "arguments", "named"),
    [
        ("latin-1", ["generate", "--help"], b"x.jsonl"),
        ("ascii", ["profile-memory", "--shape", "qwen3-0.6b", "--dry-run", "--gpu-memory", "24GiB"], b"KV cache"),
        ("utf-8:strict", ["doctor", "-o", os.fsdecode(b"\xfcber/x")], b"mkdir -p"),
    ],
)
def test_reports_go_to_a_terminal_of_any_encoding(
    tmp_path: Path, encoding: str, arguments: list[str], named: bytes
) -> None:
    environ = {**ENVIRON, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    command = [sys.executable, "-P", "-m", "nvcli", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert named in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "in.jsonl", "-o", "-", "-m", "model"], 2, b"output is closed; name an output file with -o"),
        (["generate", "-p", "Hi", "-m", "model"], 2, b"output is closed, and answers go there"),
        (["models"], 3, b"output cannot be written: it is closed"),
    ],
)
def test_results_for_a_closed_standard_output_are_refused(
    tmp_path: Path, model_folder: Path, arguments: list[str], code: int, message: bytes
) -> None:
    write_rows(tmp_path / "in.jsonl", 1)
    (tmp_path / "model").symlink_to(model_folder)
    command = nvcli_command(*arguments, cwd=tmp_path, fakes="")
    result = subprocess.run(
        ["bash", "-c", f"{shlex.join(command)} >&-"], cwd=tmp_path, env=ENVIRON, capture_output=True, timeout=120
    )
    assert result.returncode == code
    assert message in result.stderr


def test_a_reader_that_leaves_ends_the_run_quietly(tmp_path: Path, model_folder: Path) -> None:
    write_rows(tmp_path / "in.jsonl", 20_000)
    command = nvcli_command(
        *("generate", "in.jsonl", "-o", "-", "-m", str(model_folder), "--progress", "none"), cwd=tmp_path, fakes=""
    )
    process = WarmPopen(command, cwd=tmp_path, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b'{"id":')
        process.stdout.close()
        process.wait(timeout=60)
        assert process.stderr is not None
        stderr = process.stderr.read()
        process.stderr.close()
    finally:
        process.kill()
    assert process.returncode == 141, stderr
    assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate x --device cuda", "no such option: --device; nvcli calls it --set device=…"),
        ("generate x --tensor-parallel-size 2", "nvcli calls it --tp"),
        ("bench --temp 1", "nvcli calls it --temperature"),
        ("chat --max_new_tokens=5", "no such option: --max_new_tokens; nvcli calls it --max-tokens"),
        ("check x --guided-json x", "nvcli calls it --set sampling.structured.json_schema=…"),
        ("doctor --kv-cache-dtype fp8", "nvcli calls it --set kv_cache_dtype=…"),
        ("generate x --max-length 5", "nvcli calls it --max-tokens or --max-model-len"),
        ("generate x --lora-path a", "no such option: --lora-path; nvcli calls it --lora"),
        ("generate x --max-lora-rank 8", "leave it out: naming an adapter (`lora`, --lora) is enough"),
        ("generate x --trust-remote-code", "leave it out: nvcli never runs code"),
        ("serve m", "no such command 'serve'; nvcli serves nothing"),
        ("run_batch", "no such command 'run_batch'; `nvcli generate` answers OpenAI batch files"),
        ("score x --temp 1", "no such option: --temp; it is about `sampling.temperature`, which has no effect here"),
        ("merge x --device cpu", "no such option: --device\n  see: nvcli merge --help"),
    ],
)
def test_names_of_other_tools_are_understood(arguments: str, message: str, nvcli_here: NvcliHere) -> None:
    result = nvcli_here(*arguments.split())
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_shown_in_one_form(command: str) -> None:
    """As `[default: …]` at the end, and for options that set a key from the key itself."""
    shown = " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())
    assert shown.count("[default: ") == shown.count("default: ")
    assert not re.search(r"; ([\w./:]+|that of A)\. ", shown.partition("Model and GPUs:")[2])
    assert ". [default" not in shown
    if "--max-num-seqs" in shown:
        assert "Maximum concurrent requests in each copy [default: 256]" in shown
