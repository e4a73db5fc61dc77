"""Downloads: the pinned bytes or a named error, and no network with a warm cache."""

from __future__ import annotations

import hashlib
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import download as module
from tools.download import download, pip_settings
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.pin import Artifact

DATA = bytes(range(256)) * 5000
ARTIFACT = Artifact("vllm", "vllm-9.9.9.tar.gz", hashlib.sha256(DATA).hexdigest())


class Index:
    """A package index on this machine that gives what a test tells it to."""

    def __init__(self) -> None:
        self.data = DATA
        self.declared = len(DATA)
        self.project = "vllm"
        self.filename = ARTIFACT.filename
        self.requests: list[str] = []
        self.failures = 0
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.requests.append(self.path)
                if index.failures:
                    index.failures -= 1
                    self.send_error(503)
                elif self.path == f"/simple/{index.project}/":
                    link = f'<a href="/files/{index.filename}">{index.filename}</a>'
                    body = f"<!DOCTYPE html><html><body>{link}</body></html>"
                    self.answer(body.encode(), "text/html", len(body))
                elif self.path == f"/files/{index.filename}":
                    self.answer(index.data, "application/gzip", index.declared)
                else:
                    self.send_error(404)

            def answer(self, body: bytes, kind: str, length: int) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple/"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index()
    thread = threading.Thread(target=index.server.serve_forever, args=(0.01,))
    thread.start()
    # Asking pip itself takes half a second; one test below does.
    monkeypatch.setattr(module, "pip_settings", lambda: {"index-url": index.url})
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield index
    index.server.shutdown()
    index.server.server_close()
    thread.join()


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def _cached(layout: Layout) -> list[str]:
    return sorted(path.name for path in layout.cache.iterdir())


def test_from_the_index_pip_uses(
    layout: Layout,
    index: Index,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "pip_settings", pip_settings)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    path = download(layout, ARTIFACT)
    assert path == layout.cache / ARTIFACT.filename
    assert path.read_bytes() == DATA
    assert _cached(layout) == [ARTIFACT.filename]
    err = capsys.readouterr().err
    assert f"Downloading {ARTIFACT.filename}" in err
    assert "1 of 1 MB" in err  # Progress.


def test_warm_cache_needs_no_network(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("The network was asked for.")

    monkeypatch.setattr(module, "_get", fail)
    monkeypatch.setattr("socket.socket.connect", fail)
    layout.cache.mkdir(parents=True)
    (layout.cache / ARTIFACT.filename).write_bytes(DATA)
    assert download(layout, ARTIFACT).read_bytes() == DATA


def test_cache_can_be_elsewhere(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_AFD_CACHE", str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ARTIFACT.filename).write_bytes(DATA)
    assert download(layout, ARTIFACT) == tmp_path / "mine" / ARTIFACT.filename


def test_other_bytes_are_refused_and_not_kept(layout: Layout, index: Index) -> None:
    index.data = DATA[:-1] + b"x"
    with pytest.raises(WorkshopError, match="not the pinned file") as caught:
        download(layout, ARTIFACT)
    assert ARTIFACT.sha256 in caught.value.why
    assert hashlib.sha256(index.data).hexdigest() in caught.value.why
    assert _cached(layout) == []


def test_truncated_answer_is_not_kept(layout: Layout, index: Index) -> None:
    index.data = DATA[:1000]  # The server declares the whole length and hangs up.
    with pytest.raises(WorkshopError, match="could not be downloaded"):
        download(layout, ARTIFACT)
    assert _cached(layout) == []


def test_corrupt_cached_file_is_set_aside(
    layout: Layout, index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    layout.cache.mkdir(parents=True)
    (layout.cache / ARTIFACT.filename).write_bytes(DATA[:1000])
    assert download(layout, ARTIFACT).read_bytes() == DATA
    assert f"{ARTIFACT.filename}.bad" in capsys.readouterr().err
    assert _cached(layout) == [ARTIFACT.filename, f"{ARTIFACT.filename}.bad"]


def test_short_outage_is_survived(layout: Layout, index: Index) -> None:
    index.failures = 1
    assert download(layout, ARTIFACT).read_bytes() == DATA


def test_unknown_file(layout: Layout, index: Index) -> None:
    index.filename = "vllm-9.9.8.tar.gz"
    with pytest.raises(WorkshopError, match=f"no {ARTIFACT.filename}") as caught:
        download(layout, ARTIFACT)
    assert str(layout.cache / ARTIFACT.filename) in caught.value.todo


def test_unknown_project(layout: Layout, index: Index) -> None:
    index.project = "other"
    with pytest.raises(WorkshopError, match="no project vllm"):
        download(layout, ARTIFACT)


def test_unreachable_index_hides_its_password(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRIES", 0)
    url = "http://me:secret@127.0.0.1:9/simple/"
    monkeypatch.setattr(module, "pip_settings", lambda: {"index-url": url})
    with pytest.raises(WorkshopError, match="could not be downloaded") as caught:
        download(layout, ARTIFACT)
    assert "127.0.0.1" in caught.value.why
    assert "secret" not in str(caught.value)
    assert _cached(layout) == []


def test_no_index(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pip_settings", lambda: {"no-index": "1"})
    with pytest.raises(WorkshopError, match="no-index"):
        download(layout, ARTIFACT)


def test_cache_that_cannot_be_made(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_AFD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(WorkshopError, match="cannot be made") as caught:
        download(layout, ARTIFACT)
    assert "VLLM_AFD_CACHE" in caught.value.todo


def test_parts_of_killed_runs_are_removed(layout: Layout, index: Index) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    layout.cache.mkdir(parents=True)
    (layout.cache / f".part-{gone.pid}-x.whl").write_bytes(b"")
    (layout.cache / f".part-{os.getppid()}-y.whl").write_bytes(b"")
    download(layout, ARTIFACT)
    assert _cached(layout) == [f".part-{os.getppid()}-y.whl", ARTIFACT.filename]


def test_pip_configuration_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = http://file.invalid/simple\ncert = /some/ca.pem\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.delenv("PIP_CERT", raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://env.invalid/simple")
    settings = pip_settings()
    assert settings["index-url"] == "http://env.invalid/simple"
    assert settings["cert"] == "/some/ca.pem"
