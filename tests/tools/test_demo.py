"""`serve-afd` and `demo`: the commands they make, and what the demo finds out.

No vLLM runs: a program takes its place that answers as the two roles would.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from traces import Maker

from tools import checkpoint, demo, serve_afd
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.process import _first_ephemeral_port, alive, free_ports
from tools.serve import flag_value, plan
from tools.serve_afd import describe, role_plan

REPOSITORY = Path(__file__).resolve().parents[2]

# Answers with the same tokens whatever its role is. FAKE_* variables spoil it.
FAKE_VLLM = '''\
import json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

args = sys.argv[1:]
role = "monolithic"
if "--afd-config.afd_role" in args:
    role = args[args.index("--afd-config.afd_role") + 1]
root = Path(sys.argv[0]).parents[2]
spoil = os.environ.get(f"FAKE_{role.upper()}", "")
print(f"(Main pid=1) INFO 11-29 10:00:00 [a.py:1] hello from {role}", flush=True)
print("a line that is none of the log's", flush=True)
# Whole at once, as who waits for it reads it, and may end this server.
part = root / f"{role}.part"
part.write_text(json.dumps(
    {"pid": os.getpid(), "args": args, "env": dict(os.environ)}))
part.replace(root / f"{role}.json")
if spoil == "dies":
    sys.exit("no weights here")
steps = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def reply(self, code, body):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def do_GET(self):
        if self.path == "/health":
            self.reply(503 if spoil == "late" else 200, {})
        elif self.path == "/version":
            self.reply(200, {"version": "0.30.0+fake"})
        elif role == "attention" and spoil != "silent":
            split = 0 if spoil == "unsplit" else steps // 2
            labels = 'engine="0",model_name="a b"'
            self.reply(200, f"""# TYPE vllm:dbo_steps counter
vllm:dbo_steps_total{{{labels}}} {100 + steps}.0
vllm:dbo_split_steps_total{{{labels}}} {10 + split}.0
vllm:afd_exchanges_total{{{labels},split="true"}} {7 + 8 * split}.0
vllm:afd_exchanges_total{{{labels},split="false"}} {9 + 4 * (steps - split)}.0
vllm:afd_exchanges_overlapped_total{{{labels}}} {5 + split}.0
vllm:afd_bytes_total{{direction="sent",{labels}}} {steps * 2.0**20}
vllm:afd_bytes_total{{direction="received",{labels}}} {steps * 2.0**20}
vllm:afd_step_wait_seconds_bucket{{{labels},le="0.1"}} 3.0
vllm:afd_step_wait_seconds_sum{{{labels}}} {1.5 + steps / 4}
""".encode())
        else:
            self.reply(200, b"")

    def do_POST(self):
        global steps
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if role == "ffn" or spoil == "refuses":
            return self.reply(501, {"error": f"This is the AFD {role} role."})
        count = body["max_tokens"]
        steps += count
        tokens = [len(body["prompt"]) * 7 + i for i in range(count)]
        if spoil == "differs" and body["stream"]:
            tokens[-1] += 1
        if spoil == "short":
            tokens.pop()
        if not body["stream"]:
            return self.reply(200, {"choices": [{"token_ids": tokens}]})
        self.send_response(200)
        self.end_headers()
        for token in tokens:
            part = {"choices": [{"token_ids": [token]}]}
            self.wfile.write(f"data: {json.dumps(part)}\\n\\n".encode())
        if spoil != "breaks":
            self.wfile.write(b"data: [DONE]\\n\\n")


port = int(args[args.index("--port") + 1])
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)


def end(*_):
    if spoil != "hangs":
        threading.Thread(target=server.shutdown).start()


signal.signal(signal.SIGTERM, end)
server.serve_forever()
if "--afd-config.trace_dir" in args and spoil != "traceless":
    folder = Path(args[args.index("--afd-config.trace_dir") + 1])
    trace = (root / "given" / f"{role}.jsonl").read_text()
    (folder / f"afd-{role}-0-20261130-120000-1-1.jsonl").write_text(trace)
'''


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    script = tmp_path / ".venv" / "bin" / "vllm"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!{sys.executable}\n{FAKE_VLLM}")
    script.chmod(0o755)
    return Layout(tmp_path)


def started(layout: Layout, role: str) -> dict[str, Any]:
    return json.loads((layout.root / f"{role}.json").read_text())


def still_running(layout: Layout) -> list[int]:
    pids = {started(layout, each.stem)["pid"] for each in layout.root.glob("*.json")}
    return [each.pid for each in alive() if each.pid in pids]


# The roles.


def test_each_role_has_its_own_port_cores_and_flags(layout: Layout) -> None:
    attention, ffn = (role_plan(layout, role) for role in serve_afd.ROLES)
    assert (attention.port, ffn.port) == (8000, 8001)
    for role, server in (("attention", attention), ("ffn", ffn)):
        assert flag_value(server.command, "--afd-config.afd-role") == role
        assert flag_value(server.command, "--host") == "127.0.0.1"
        assert server.model == checkpoint.DEFAULT
        assert server.command[2] == str(layout.build / "models" / checkpoint.DEFAULT)
    assert "--enable-dbo" in attention.command
    assert not any("dbo" in word or "caching" in word for word in ffn.command)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ({0, 1}, ("0", "1")),
        ({2, 3, 6, 7}, ("2,3", "6,7")),
        ({5}, ("nobind", "nobind")),
    ],
)
def test_the_roles_share_no_core(
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    cores: set[int],
    expected: tuple[str, str],
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    bound = tuple(
        role_plan(layout, role).env["VLLM_CPU_OMP_THREADS_BIND"]
        for role in serve_afd.ROLES
    )
    assert bound == expected
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "9")
    assert role_plan(layout, "ffn").env["VLLM_CPU_OMP_THREADS_BIND"] == "9"


def test_flags_of_the_user_replace_ours(layout: Layout) -> None:
    mine = ["--afd-config.afd_port=4", "--no-enable-dbo", "--port=9"]
    server = role_plan(layout, "attention", afd_port=3, arguments=mine)
    assert server.port == 9
    assert server.command[-3:] == mine
    assert "--afd-config.afd_port" not in server.command
    assert "--enable-dbo" not in server.command
    assert flag_value(server.command, "--afd-config.afd-role") == "attention"


def test_a_whole_config_of_the_user_replaces_ours(layout: Layout) -> None:
    config = '{"afd_role": "ffn", "afd_port": 4}'
    command = role_plan(layout, "ffn", arguments=["--afd-config", config]).command
    assert not any(word.startswith("--afd-config.") for word in command)
    for bad in (config, "ffn", "[1]", "{}"):
        with pytest.raises(WorkshopError, match="--afd-config"):
            role_plan(layout, "attention", arguments=["--afd-config", bad])


def test_another_tree_comes_first(layout: Layout, tmp_path: Path) -> None:
    env = role_plan(layout, "ffn", tree=tmp_path).env
    assert env["PYTHONPATH"] == str(tmp_path)
    assert "PYTHONPATH" not in role_plan(layout, "ffn").env


@pytest.mark.parametrize("role", serve_afd.ROLES)
def test_the_printed_line_can_be_pasted(layout: Layout, role: str) -> None:
    server = role_plan(layout, role, "org/model", arguments=["--hf-token", "a b"])
    text = describe(layout, role, server, "org/model")
    words = shlex.split(text.splitlines()[1])
    assert words[-len(server.command) :] == server.command
    assert dict(w.split("=", 1) for w in words[: -len(server.command)]) == server.env
    other = "ffn" if role == "attention" else "attention"
    assert f"make serve-afd ROLE={other} MODEL=org/model" in text


def test_a_role_must_be_named(
    workspace: Layout, run_tools: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_tools(workspace, "serve-afd")
    assert done.returncode == 2
    assert "--role" in done.stderr
    done = run_tools(workspace, "serve-afd", "--role", "experts")
    assert done.returncode == 2
    assert "experts" in done.stderr
    done = run_tools(
        workspace, "serve-afd", "--role=ffn", "--dry-run", "--", "--seed=3"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("--seed=3")
    assert not workspace.venv.exists()


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            ["serve-afd", "ROLE=ffn", "PORT=81", "MODEL=a b", "ARGS=--seed 3"],
            ["serve-afd", "--role", "ffn", "--model", "a b", "--port", "81"],
        ),
        (["serve-afd", "ARGS=--seed 3"], ["serve-afd"]),
        (["demo", "MODEL=a b", "ARGS=--seed 3"], ["demo", "--model", "a b"]),
        (["demo", "ARGS=--seed 3"], ["demo"]),
    ],
)
def test_make_passes_on_what_it_is_given(
    target: list[str], expected: list[str]
) -> None:
    # The tests may run under `make` themselves, which hands its flags down.
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS", "MODEL", "PORT", "ROLE")
    done = subprocess.run(
        ["make", "-n", *target],
        env={name: value for name, value in os.environ.items() if name not in ours},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    words = shlex.split(done.stdout)
    assert words[words.index("tools") + 1 :] == [*expected, "--", "--seed", "3"]
    assert words[words.index("tools") - 3] == "exec", "a signal reaches the server"


# The demo.


def run(layout: Layout, *arguments: str) -> dict[str, Any]:
    return demo.demo(layout, "org/model", arguments)


def test_it_compares_and_reports(
    layout: Layout, capfd: pytest.CaptureFixture[str]
) -> None:
    report = run(layout, "--max-num-seqs", "4")
    assert demo.problems(report) == []
    assert report["tokens_equal"] is True
    assert report["differing"] == []
    assert report["requests"] == sum(len(requests) for _, requests in demo.ROUNDS)
    assert report["tokens"] == sum(
        each.max_tokens for _, requests in demo.ROUNDS for each in requests
    )
    steps, split = report["tokens"], report["tokens"] // 2
    assert (report["steps"], report["split_steps"]) == (steps, split)
    assert report["exchanges"] == 8 * split + 4 * (steps - split)
    assert report["exchanges_overlapped"] == split
    assert report["bytes"] == steps * 2**21
    assert report["wait_s"] == steps / 4
    assert report["timeline"] is None
    assert report["overlap_efficiency"] is None
    assert report["overlap_efficiency_reason"] == demo.NO_TRACE
    assert report["version"] == "0.30.0+fake"
    assert report["exit_status"] == {"attention": 0, "ffn": 0}
    file = layout.build / "demo" / "report.json"
    assert json.loads(file.read_text()) == report

    out, err = capfd.readouterr()
    for title, _ in demo.ROUNDS:
        assert title in out
    assert f"{steps * 2} MiB" in out
    for role in serve_afd.ROLES:
        assert report["commands"][role] in err.splitlines()

    assert not still_running(layout)
    seen = {role: started(layout, role)["args"] for role in report["commands"]}
    for args in seen.values():
        assert args[-2:] == ["--max-num-seqs", "4"]
    ports = {flag_value(args, "--port") for args in seen.values()}
    meet = {flag_value(args, "--afd-config.afd-port") for args in seen.values()}
    assert len(ports) == 3
    assert len(meet) == 2, "the roles meet on one port; one vLLM has none"
    assert not meet & ports
    assert "--enable-dbo" in seen["attention"]
    assert not any("dbo" in word for word in seen["monolithic"] + seen["ffn"])


@pytest.fixture
def traced(layout: Layout) -> Layout:
    """A layout whose vLLM can trace."""
    module = layout.tree / "vllm" / "distributed" / "afd_transfer" / "trace.py"
    module.parent.mkdir(parents=True)
    module.touch()
    maker = Maker(layout.root / "given")
    for rows in ((3, 4), (3, 4), (7,)):
        maker.step(*rows, slower=0 if len(rows) > 1 else 100_000)
    maker.write()
    return layout


def test_the_timeline_is_left(
    traced: Layout, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = traced.build / "demo"
    (folder / "traces").mkdir(parents=True)
    old = folder / "traces" / "afd-ffn-0-20200101-000000-1-1.jsonl"
    old.write_text("of the last demo\n")
    report = run(traced)
    assert demo.problems(report) == []
    assert not old.exists()
    assert report["traces"] == [
        f"build/demo/traces/afd-{role}-0-20261130-120000-1-1.jsonl"
        for role in serve_afd.ROLES
    ]
    assert report["timeline"] == "build/demo/timeline.html"
    for name in ("timeline.html", "timeline.png", "timeline.perfetto.json"):
        assert (folder / name).stat().st_size > 1000
    for key in ("both_compute", "schedule_efficiency", "overlap_efficiency"):
        assert 0 < report[key] < 1
    assert "T_one_stage" in report["overlap_efficiency_reason"]
    out, err = capfd.readouterr()
    assert "build/demo/timeline.html" in err
    assert f"{report['overlap_efficiency']:.0%}" in out
    for role in serve_afd.ROLES:
        args = started(traced, role)["args"]
        assert flag_value(args, "--afd-config.trace-dir") == str(folder / "traces")
    assert "trace" not in " ".join(started(traced, "monolithic")["args"])


def test_a_missing_trace_is_an_error(
    traced: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FFN", "traceless")
    with pytest.raises(WorkshopError, match="no traces of both roles") as caught:
        run(traced)
    assert "afd-attention-0" in caught.value.why


@pytest.mark.parametrize(
    ("role", "spoil", "problem"),
    [
        ("monolithic", "differs", "Tokens differ: streamed, with a long one."),
        ("attention", "unsplit", "No step was split in two."),
        ("attention", "silent", "did not say how many steps"),
    ],
)
def test_what_is_not_shown_is_a_problem(
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    spoil: str,
    problem: str,
) -> None:
    monkeypatch.setenv(f"FAKE_{role.upper()}", spoil)
    report = run(layout)
    (found,) = demo.problems(report)
    assert problem in found
    assert report["tokens_equal"] is (spoil != "differs")


@pytest.mark.parametrize(
    ("role", "spoil", "message"),
    [
        ("ffn", "dies", "The ffn server ended with status 1"),
        ("attention", "dies", "The attention server ended with status 1"),
        ("monolithic", "dies", "The monolithic server ended with status 1"),
        ("ffn", "late", "The ffn server is not up after 3 s"),
        ("attention", "refuses", "HTTP 501: .*AFD attention role"),
        ("attention", "short", "11 of 12 tokens"),
        ("attention", "breaks", "the stream broke off"),
    ],
)
def test_a_failure_is_named_and_leaves_nothing(
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
    role: str,
    spoil: str,
    message: str,
) -> None:
    monkeypatch.setenv(f"FAKE_{role.upper()}", spoil)
    if spoil == "late":
        monkeypatch.setattr(demo.wait_healthy, "__defaults__", (3,))
    with pytest.raises(WorkshopError, match=message) as caught:
        run(layout)
    assert f"{role}.log" in caught.value.todo
    if spoil == "dies":
        assert "no weights here" in caught.value.why
    assert not still_running(layout)


def test_a_server_that_does_not_end_is_killed(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FFN", "hangs")
    monkeypatch.setattr(demo, "STOP_TIMEOUT_S", 1)
    report = run(layout)
    assert report["exit_status"] == {"attention": 0, "ffn": None}
    assert demo.problems(report) == ["The ffn server had to be killed."]
    assert not still_running(layout)


@pytest.mark.parametrize("flag", ["--port", "--host", "--afd_config", "--config"])
def test_flags_that_it_sets_itself_are_refused(layout: Layout, flag: str) -> None:
    with pytest.raises(WorkshopError, match=flag.replace("_", "-")):
        run(layout, f"{flag}=1")


DEMO = """\
import sys
from pathlib import Path
import tools.demo as module
from tools.layout import Layout

module.prepare = lambda *_: None
sys.exit(module.command(["--model", "org/model"], obj=Layout(Path(sys.argv[1]))))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demo_leaves_nothing(
    layout: Layout, number: signal.Signals
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DEMO, str(layout.root)],
        cwd=REPOSITORY,
        # The attention role never gets ready.
        env=os.environ | {"FAKE_ATTENTION": "late"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while len(list(layout.root.glob("*.json"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline, "the servers did not start"
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(30) != 0
        while still_running(layout):
            assert time.monotonic() < deadline + 30, "servers were left"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()


def test_the_monolithic_server_has_the_same_model_and_dtype(layout: Layout) -> None:
    plans = demo._plans(layout, None, (), None)
    for each in plans.values():
        assert flag_value(each.command, "--dtype") == "float32"
        assert each.model == checkpoint.DEFAULT
        assert each.command[2] == plan(layout).command[2]
    plans = demo._plans(layout, None, ("--dtype=bfloat16",), None)
    for each in plans.values():
        assert each.command[-1] == "--dtype=bfloat16"
        assert "float32" not in each.command


def test_progress_says_what_a_server_logged_last(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_PROGRESS_S", 0)
    monkeypatch.setenv("FAKE_FFN", "late")
    monkeypatch.setattr(demo.wait_healthy, "__defaults__", (2,))
    with pytest.raises(WorkshopError):
        run(layout)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.endswith("s  ffn: hello from ffn") for line in lines)
    assert any(line.endswith("s  attention: up") for line in lines)


def test_ports_are_all_different() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    # A connection of another process could get one that is above.
    assert all(port < _first_ephemeral_port() for port in ports)
