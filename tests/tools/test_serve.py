"""`serve`: the command it makes, the port it checks, the signals it hands on."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools import checkpoint
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.serve import check_port, describe, flag_value, plan

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_the_default_is_dbo_on_the_tiny_model(layout: Layout) -> None:
    server = plan(layout)
    folder = layout.build / "models" / checkpoint.DEFAULT
    assert server.command[:3] == [
        str(layout.venv / "bin" / "vllm"),
        "serve",
        str(folder),
    ]
    assert "--enable-dbo" in server.command
    assert flag_value(server.command, "--host") == "127.0.0.1"
    assert flag_value(server.command, "--dbo-decode-token-threshold") == "2"
    assert flag_value(server.command, "--served-model-name") == checkpoint.DEFAULT
    assert server.env["TRITON_INTERPRET"] == "1"
    assert server.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert server.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("given", "dropped"),
    [
        (["--max-model-len", "99"], "--max-model-len"),
        (["--max-model-len=99"], "--max-model-len"),
        (["--max_model_len=99"], "--max-model-len"),
        (["--no-enable-dbo"], "--enable-dbo"),
        (["--enable-prefix-caching"], "--no-enable-prefix-caching"),
        (["--no-enforce-eager"], "--enforce-eager"),
    ],
)
def test_a_flag_of_the_user_replaces_ours(
    layout: Layout, given: list[str], dropped: str
) -> None:
    command = plan(layout, arguments=given).command
    assert dropped in plan(layout).command
    assert command[-len(given) :] == given
    assert dropped not in command[: -len(given)]


def test_the_last_port_counts(layout: Layout) -> None:
    assert plan(layout, port=8001).port == 8001
    server = plan(layout, port=8001, arguments=["--port", "8002", "--host=::1"])
    assert (server.port, server.host) == (8002, "::1")
    assert server.url == "http://[::1]:8002"
    assert "8001" not in server.command


@pytest.mark.parametrize("port", ["http", "0", "65536", "-1"])
def test_a_port_that_is_none_is_named(layout: Layout, port: str) -> None:
    with pytest.raises(WorkshopError, match=f"--port {port}"):
        plan(layout, arguments=["--port", port])


def test_flags_of_a_config_file_count_as_given(layout: Layout, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = tmp_path / "serve.yaml"
    config.write_text("max_model_len: 99\nport: 9000\n")
    server = plan(layout, arguments=[f"--config={config}"])
    assert not {"--max-model-len", "--port"} & set(server.command)
    assert server.port == 9000
    assert plan(layout, arguments=["--config", str(config), "--port=1"]).port == 1
    with pytest.raises(WorkshopError, match=r"missing\.yaml"):
        plan(layout, arguments=["--config", "missing.yaml"])


def test_a_model_of_the_user(layout: Layout, tmp_path: Path) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    server = plan(layout, str(model))
    assert server.command[2] == str(model)
    assert server.model == str(model)
    assert "--max-model-len" not in server.command
    assert "HF_HUB_OFFLINE" not in server.env
    assert plan(layout, "org/model").command[2] == "org/model"
    named = plan(layout, "org/model", arguments=["--served-model-name", "mine"])
    assert named.model == "mine"


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused(layout: Layout, model: str) -> None:
    with pytest.raises(WorkshopError, match=model):
        plan(layout, model)


def test_a_port_in_use_is_named_with_its_process(taken: int) -> None:
    with pytest.raises(WorkshopError) as caught:
        check_port("127.0.0.1", taken)
    assert str(taken) in caught.value.what
    assert str(os.getpid()) in caught.value.why
    assert f"PORT={taken + 1}" in caught.value.todo


def test_a_port_is_free_again_at_once() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            # Closed by the server first: the port is in TIME_WAIT then.
            accepted.close()
            client.recv(1)
    check_port("127.0.0.1", port)


def test_a_host_that_is_none_is_named() -> None:
    with pytest.raises(WorkshopError, match="no such host"):
        check_port("no such host", 8000)


def test_the_printed_line_can_be_pasted(layout: Layout) -> None:
    server = plan(layout, arguments=["--override-generation-config", '{"top_k": 1}'])
    line = describe(server).splitlines()[1]
    words = shlex.split(line)
    assert words[-len(server.command) :] == server.command
    assert dict(word.split("=", 1) for word in words[: -len(server.command)]) == (
        server.env
    )
    assert f"{server.url}/v1/completions" in describe(server)


def test_dry_run_prints_the_line_and_makes_nothing(
    workspace: Layout, run_tools: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    before = sorted(workspace.root.rglob("*"))
    done = run_tools(
        workspace, "serve", "--dry-run", "--port", "8123", "--", "--max-num-seqs", "4"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("--max-num-seqs 4")
    assert "--port 8123" in done.stdout
    assert sorted(workspace.root.rglob("*")) == before


# A `vllm` that notes how it was started and what ends it.
FAKE_VLLM = """\
import json, os, signal, sys, time
from pathlib import Path

root = Path(sys.argv[0]).parents[2]
signal.signal(signal.SIGTERM, lambda *_: ((root / "ended").touch(), sys.exit(0)))
facts = {"pid": os.getpid(), "argv": sys.argv, "env": dict(os.environ)}
(root / "started.tmp").write_text(json.dumps(facts))
(root / "started.tmp").rename(root / "started")
time.sleep(30)
"""

SERVE = """\
import sys
from pathlib import Path
import tools.serve as module
from tools.layout import Layout

module.build = lambda *_: None
module.checkpoint.ensure = lambda *_: None
module.serve(Layout(Path(sys.argv[1])), None, int(sys.argv[2]), sys.argv[3:])
"""


def started(root: Path, process: subprocess.Popen[bytes]) -> dict[str, object]:
    deadline = time.monotonic() + 20
    while not (root / "started").exists():
        assert process.poll() is None, "it ended before it served"
        assert time.monotonic() < deadline, "it did not start"
        time.sleep(0.02)
    return json.loads((root / "started").read_text())


def test_the_server_takes_the_place_of_the_tool(layout: Layout) -> None:
    script = layout.venv / "bin" / "vllm"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!{sys.executable}\n{FAKE_VLLM}")
    script.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(layout.root), "8124", "--max-num-seqs=4"],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "VLLM_CPU_KVCACHE_SPACE": "3"},
    )
    try:
        facts = started(layout.root, process)
        assert facts["pid"] == process.pid
        assert facts["argv"][-1] == "--max-num-seqs=4"
        assert facts["env"]["TRITON_INTERPRET"] == "1"
        assert facts["env"]["VLLM_CPU_KVCACHE_SPACE"] == "3", "the user's own counts"
        assert "PYTHONPATH" not in facts["env"], "it could hold another vllm"
        process.terminate()
        assert process.wait(10) == 0
        assert (layout.root / "ended").exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_sigterm_to_make_ends_the_server(layout: Layout) -> None:
    """A shell between make and the server would die alone and leave the server."""
    shutil.copy(REPOSITORY / "Makefile", layout.root)
    (layout.root / "tools").mkdir()
    (layout.root / "tools" / "bootstrap.py").touch()
    python = layout.venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\n{FAKE_VLLM}")
    python.chmod(0o755)
    make = subprocess.Popen(
        [
            "make",
            f"PYTHON={sys.executable}",
            "PORT=8125",
            "ARGS=--max-num-seqs 4",
            "serve",
        ],
        cwd=layout.root,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        facts = started(layout.root, make)
        assert facts["argv"][1:] == [
            *("-m", "tools", "serve", "--port", "8125"),
            *("--", "--max-num-seqs", "4"),
        ]
        make.terminate()
        make.wait(10)
        deadline = time.monotonic() + 10
        while not (layout.root / "ended").exists():
            assert time.monotonic() < deadline, "the server was not told"
            time.sleep(0.02)
    finally:
        try:
            os.killpg(make.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        make.wait()
