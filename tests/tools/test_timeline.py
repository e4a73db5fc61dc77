"""`timeline`: reading traces, what it tells of them, and three ways to show them."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from traces import SEND, US, Maker, header

from tools import timeline, trace
from tools.errors import WorkshopError
from tools.layout import Layout
from tools.trace import Event, ideal_time, join, load, read, summarise


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "traces")


@pytest.fixture
def files(maker: Maker) -> tuple[Path, Path]:
    maker.step(8, kind="warmup")
    for _ in range(3):
        maker.step(3, 4)
    maker.step(1)
    return maker.write()


# Reading.


def test_files_may_come_in_any_order(files: tuple[Path, Path]) -> None:
    for pair in (files, files[::-1]):
        session = load(pair)
        assert [each.role for each in session.traces] == ["attention", "ffn"]
        assert not session.notes
        assert {each.seq for each in session.events()} == {1, 2, 3, 4, 5}


EVENT = {
    "type": "event",
    "event": "compute",
    "begin_ns": 5,
    "end_ns": 9,
    "seq": 1,
    "layer": 0,
    "stage": 0,
    "rows": 3,
}


@pytest.mark.parametrize(
    ("lines", "number", "why"),
    [
        ([], 1, "It is empty"),
        (["half"], 1, "not JSON"),
        ([{}], 1, '"format": "vllm-afd-trace"'),
        ([header("ffn", format="other")], 1, '"format": "vllm-afd-trace"'),
        ([header("ffn", version=2)], 1, "version 2 of the format"),
        ([header("both")], 1, "role is 'both'"),
        ([header("ffn", layers="x")], 1, "layers is 'x', not list"),
        ([header("ffn", layers=[1])], 1, "layers is not a list of names"),
        ([header("ffn", pid=None)], 1, "pid is None, not int"),
        ([header("ffn"), EVENT, "{", EVENT], 3, "not JSON"),
        ([header("ffn"), EVENT, "[]", EVENT], 3, "type is None"),
        ([header("ffn"), EVENT | {"type": "span"}], 2, "type is 'span', not one of"),
        ([header("ffn"), EVENT | {"type": []}], 2, "type is []"),
        ([header("ffn"), EVENT | {"event": "sleep"}], 2, "event is 'sleep'"),
        ([header("ffn"), EVENT | {"begin_ns": 10}], 2, "ends before it begins"),
        ([header("ffn"), EVENT | {"begin_ns": 1.5}], 2, "begin_ns is 1.5, not int"),
        ([header("ffn"), EVENT | {"rows": True}], 2, "rows is True, not int"),
        ([header("ffn"), EVENT | {"layer": 3}], 2, "layer is 3, not 0 to 2"),
        ([header("ffn"), EVENT | {"stage": 2}], 2, "stage is 2, not 0 to 1"),
        (
            [
                header("ffn"),
                EVENT | {"type": "step", "kind": "eager", "stage_tokens": [1, 2, 3]},
            ],
            2,
            "stage_tokens is [1, 2, 3]",
        ),
        (
            [header("ffn"), {"type": "end", "monotonic_ns": 1}, EVENT],
            3,
            "after the one that ends it",
        ),
        ([header("ffn"), header("ffn")], 2, "type is 'header'"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, lines: list[Any], number: int, why: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(
        "".join(
            f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines
        )
    )
    with pytest.raises(WorkshopError) as caught:
        read(path)
    assert caught.value.what.startswith(f"{path}, line {number}:")
    assert why in caught.value.why


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    with pytest.raises(WorkshopError, match=re.escape(str(path))):
        read(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(WorkshopError, match=re.escape(str(path))):
        read(path)


def test_what_a_kill_leaves_is_read_and_told(files: tuple[Path, Path]) -> None:
    whole = files[0].read_text()
    lines = whole.splitlines(keepends=True)
    expected = len(read(files[0]).events)
    # The line that ends it is missing, then a part of the one before, then all of it.
    for cut, note in (
        (len(lines[-1]), "was not closed"),
        (len(lines[-1]) + 5, f"line {len(lines) - 1}, the last one, is not complete"),
        (len(lines[-1]) + len(lines[-2]), "was not closed"),
    ):
        files[0].write_text(whole[:-cut])
        found = read(files[0])
        assert len(found.events) == expected
        (told,) = found.notes
        assert note in told
        assert files[0].name in told
    # Every cut behind the header can be read.
    first = len(lines[0])
    for size in range(first, first + len(lines[1]) + 1):
        files[0].write_text(whole[:size])
        assert len(read(files[0]).events) == (size == first + len(lines[1]))
    files[0].write_text(whole[: first - 3])
    with pytest.raises(WorkshopError, match="line 1"):
        read(files[0])


def test_missing_lines_are_told(maker: Maker) -> None:
    maker.step(1)
    maker.put("ffn", type="dropped", count=7)
    (note,) = load(maker.write()).notes
    assert "7 lines" in note


def test_two_files_of_one_role(files: tuple[Path, Path]) -> None:
    with pytest.raises(WorkshopError, match="of the ffn role") as caught:
        join(read(files[1]), read(files[1]))
    assert f"{files[1]}: line 1" in caught.value.why


@pytest.mark.parametrize("what", ["layers", "steps", "rows", "time", "rank"])
def test_files_of_two_sessions(maker: Maker, tmp_path: Path, what: str) -> None:
    maker.step(3, 4)
    attention, _ = maker.write()
    other = Maker(tmp_path / "other")
    why = "ended"
    if what == "layers":
        other.headers = {"ffn": {"layers": ["x", "y"]}}
        why = "layers differ"
    elif what == "rank":
        other.headers = {"ffn": {"peer": "AFD attention peer (rank 1) at host:1"}}
        why = "served attention rank 1, not 0"
    elif what == "steps":
        other.seq = 7
        why = "no step in common"
    elif what == "time":
        other.now = 10**12
    other.step(*((3, 5) if what == "rows" else (3, 4)))
    if what == "rows":
        why = r"\[3, 4\] rows on attention, \[3, 5\] on ffn"
    _, ffn = other.write()
    with pytest.raises(WorkshopError, match="not of one session") as caught:
        load((attention, ffn))
    assert re.search(why, caught.value.why)
    assert str(attention) in caught.value.why
    assert str(ffn) in caught.value.why


# Two clocks.


@pytest.mark.parametrize("by", ["attention", "ffn"])
def test_clocks_of_two_hosts_are_aligned_by_heartbeats(
    tmp_path: Path, maker: Maker, by: str
) -> None:
    maker.step(3, 4)
    there = load(maker.write())
    skewed = Maker(tmp_path / "skewed", skew=123_456_789_000)
    skewed.headers = {"ffn": {"boot_id": "another", "host": "two"}}
    skewed.step(3, 4)
    offset = skewed.skew if by == "attention" else -skewed.skew
    for error, trip in ((9_000_000, 80_000_000), (40, 4_000), (700_000, 60_000_000)):
        skewed.put(
            by,
            type="clock",
            monotonic_ns=1,
            peer_offset_ns=offset + error,
            round_trip_ns=trip,
        )
    session = load(skewed.write())
    # The shortest round trip is the most exact.
    error = 40 if by == "attention" else -40
    assert session.attention.events == there.attention.events
    for ours, theirs in zip(session.ffn.events, there.ffn.events, strict=True):
        assert (ours.begin, ours.end) == (theirs.begin - error, theirs.end - error)
    assert session.error_ns == 2000
    assert "3 heartbeats, to within 2 us" in session.alignment


def test_clocks_of_two_hosts_without_heartbeats(maker: Maker) -> None:
    maker.skew = 5_000_000_000
    maker.headers = {
        "ffn": {"boot_id": "another", "monotonic_ns": 5_000_000_000},
    }
    maker.step(3, 4)
    session = load(maker.write())
    assert "time of day" in session.alignment
    assert summarise(session).early == 0


def test_boot_ids_that_are_not_known_are_not_equal(maker: Maker) -> None:
    maker.headers = {role: {"boot_id": ""} for role in ("attention", "ffn")}
    maker.step(1)
    assert "time of day" in load(maker.write()).alignment


def test_received_before_sent_is_counted(files: tuple[Path, Path]) -> None:
    assert summarise(load(files)).early == 0
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    moved = 0
    for line in lines:
        if line.get("event") == "recv" and line["seq"] == 2:
            line["begin_ns"] = line["end_ns"] = 1
            moved += 1
    files[1].write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert 0 < summarise(load(files)).early <= moved


# What it tells.


def event(role: str, layer: int, stage: int, length: int) -> Event:
    return Event(role, "compute", 0, length, 1, layer, stage, 1)


@pytest.mark.parametrize(
    ("attention", "ffn", "expected"),
    [
        # Two layers, two stages. A fill of one A; FFN is the slower role.
        (10, 30, 10 + 4 * 30 + 5),
        # Attention is: after its own four, the last answer and what follows.
        (30, 10, 4 * 30 + 10 + 5),
        (20, 20, 4 * 20 + 20 + 5),
    ],
)
def test_the_ideal_schedule(attention: int, ffn: int, expected: int) -> None:
    order = [(layer, stage) for layer in (0, 1) for stage in (0, 1)]
    ours = [event("attention", *at, attention) for at in order]
    # What follows the last answers: stage 0 ends before stage 1 has its answer.
    ours += [event("attention", 2, 0, 5), event("attention", 2, 1, 5)]
    theirs = [event("ffn", *at, ffn) for at in order]
    assert ideal_time(ours, theirs, 2) == expected


def test_the_summary_of_split_steps(files: tuple[Path, Path]) -> None:
    summary = summarise(load(files))
    assert summary.exchanges == 2 * (1 + 3 * 2 + 1)
    assert summary.early == 0
    assert {key: count for key, (count, _) in summary.steps.items()} == {
        ("eager", 1): 1,
        ("eager", 2): 3,
        ("warmup", 1): 1,
    }
    lengths = [each.length for each in summary.waits]
    assert lengths == sorted(lengths, reverse=True)
    overlap = summary.overlap
    assert overlap is not None
    assert overlap.steps == 3
    assert overlap.attention == 6 * 100 * US
    assert overlap.ffn == 4 * 80 * US
    assert overlap.serial == 920 * US
    # 4 of attention, as it is the slower one; FFN's last; both ends.
    assert overlap.ideal == 600 * US
    assert overlap.ideal < overlap.measured < overlap.serial
    assert 0 < overlap.both <= overlap.ffn
    expected = (overlap.serial - overlap.measured) / (overlap.serial - overlap.ideal)
    assert overlap.schedule_efficiency == pytest.approx(expected)
    assert overlap.overlap_efficiency is None
    assert "cannot be told from this trace" in timeline.describe_overlap(overlap)[-1]


def test_overlap_efficiency_needs_whole_steps_of_the_same_rows(maker: Maker) -> None:
    maker.step(3, 4)
    maker.step(5, 5)
    # Warm-up does not count, nor does another number of rows.
    maker.step(7, kind="warmup")
    maker.step(6)
    assert load(maker.write())
    overlap = summarise(load(maker.write())).overlap
    assert overlap is not None
    assert overlap.overlap_efficiency is None

    maker.step(7, slower=150 * US)
    overlap = summarise(load(maker.write())).overlap
    assert overlap is not None
    count, two_stages, ideal = overlap.compared or (0, 0, 0)
    assert count == 1
    one_stage = 3 * 250 * US + 2 * (80 * US + 2 * SEND)
    assert overlap.one_stage == one_stage
    expected = (one_stage - two_stages) / (one_stage - ideal)
    assert overlap.overlap_efficiency == pytest.approx(expected)
    assert f"{expected:.0%}" in timeline.describe_overlap(overlap)[-1]


def test_a_session_without_split_steps(maker: Maker) -> None:
    maker.step(3)
    session = load(maker.write())
    assert summarise(session).overlap is None
    assert "No step was split" in timeline.describe_overlap(None)[0]
    timeline.write(session, maker.folder / "out")


def test_a_session_without_events(maker: Maker) -> None:
    session = load(maker.write())
    with pytest.raises(WorkshopError, match="hold no event"):
        timeline.write(session, maker.folder / "out")


def test_the_last_steps_are_kept(files: tuple[Path, Path]) -> None:
    session = load(files)
    assert trace.last_steps(session, 10**6) is session
    count = len([each for each in session.events() if each.seq >= 4])
    for most in (count, count + 3):
        kept = trace.last_steps(session, most)
        assert {each.seq for each in kept.events()} == {4, 5}
        assert {each.seq for each in kept.attention.steps} == {4, 5}
    assert {each.seq for each in trace.last_steps(session, 1).events()} == {5}


# How it is shown.


def test_perfettos_trace(files: tuple[Path, Path]) -> None:
    session = load(files)
    found = json.loads(json.dumps(timeline.perfetto(session)))
    events = found["traceEvents"]
    slices = [each for each in events if each["ph"] == "X"]
    steps = sum(len(each.steps) for each in session.traces)
    assert len(slices) == len(session.events()) + steps
    assert all(each["ts"] >= 0 and each["dur"] >= 0 for each in slices)
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] == "thread_name"
    }
    assert names[1, 1] == "stage 0"
    assert names[2, 4] == "stage 1 recv"
    # In a thread, slices follow one another or lie within one another.
    for thread in {(each["pid"], each["tid"]) for each in slices}:
        ends: list[float] = []
        for each in sorted(
            (s for s in slices if (s["pid"], s["tid"]) == thread),
            key=lambda s: (s["ts"], -s["dur"]),
        ):
            while ends and ends[-1] <= each["ts"] + 1e-6:
                ends.pop()
            end = each["ts"] + each["dur"]
            assert not ends or end <= ends[-1] + 1e-6
            ends.append(end)
    flows = [each for each in events if each["ph"] in "sf"]
    assert len(flows) == 2 * 2 * summarise(session).exchanges
    by_id: dict[int, list[dict[str, Any]]] = {}
    for each in flows:
        by_id.setdefault(each["id"], []).append(each)
    for start, finish in by_id.values():
        assert (start["ph"], finish["ph"]) == ("s", "f")
        assert start["pid"] != finish["pid"]
        assert start["tid"] == finish["tid"]
        assert start["ts"] <= finish["ts"]
    json.dumps(found, allow_nan=False)


def page_data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def test_the_page_is_complete_in_itself(maker: Maker) -> None:
    evil = "</script><script>alert(1)</script>"
    maker.headers = {
        role: {"layers": [evil, "b"], "host": "<b>"} for role in ("attention", "ffn")
    }
    maker.step(3, 4)
    session = load(maker.write())
    text = timeline.page(session, session)
    assert not re.search(r"(src|href)=|url\(|https?:|@import|fetch\(", text)
    assert "default-src 'none'" in text
    assert text.count("</script>") == 2
    data = page_data(text)
    assert data["layers"] == [evil, "b"]
    assert {len(column) for column in data["events"].values()} == {
        len(session.events())
    }
    assert data["first_step"] == 1


def test_the_page_of_a_large_session_has_its_end(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timeline, "MOST_EVENTS", 60)
    session = load(files)
    outputs = timeline.write(session, tmp_path / "out")
    data = page_data(outputs.page.read_text())
    assert len(data["events"]["seq"]) <= 60
    assert max(data["events"]["seq"]) == 5
    assert any(f"Of {len(session.events())} events" in note for note in data["notes"])
    slices = json.loads(outputs.perfetto.read_text())["traceEvents"]
    assert sum(each["ph"] == "X" for each in slices) > 60


def test_the_picture(files: tuple[Path, Path], tmp_path: Path) -> None:
    outputs = timeline.write(load(files), tmp_path / "out")
    with Image.open(outputs.picture) as image:
        assert image.size[0] == 1600
        colors = {color for _, color in image.convert("RGB").getcolors(1 << 24)}
    # Both stages have computed.
    assert {(0x2F, 0x6F, 0xB7), (0xB8, 0x64, 0x0F)} <= colors


@pytest.mark.parametrize("span", [1, 999, 12_345, 10**6, 10**9, 7 * 10**10])
def test_a_picture_of_any_length(maker: Maker, tmp_path: Path, span: int) -> None:
    maker.attention = span
    maker.step(3, 4)
    session = load(maker.write())
    timeline.write(session, tmp_path / "out")


# The verb.


REPOSITORY = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_verb(
    workspace: Layout, run_tools: Run, files: tuple[Path, Path], tmp_path: Path
) -> None:
    done = run_tools(workspace, "timeline", *map(str, files))
    assert done.returncode == 0, done.stderr
    assert "none was received before it was sent" in done.stdout
    assert "Schedule efficiency" in done.stdout
    for name in ("timeline.html", "timeline.png", "timeline.perfetto.json"):
        assert (workspace.build / "timeline" / name).stat().st_size > 1000
        assert f"build/timeline/{name}" in done.stderr

    out = tmp_path / "elsewhere"
    done = run_tools(
        workspace, "timeline", *map(str, files), "--out", str(out), "--steps", "2-3"
    )
    assert done.returncode == 0, done.stderr
    data = page_data((out / "timeline.html").read_text())
    assert set(data["events"]["seq"]) == {2, 3}


def test_the_demos_traces_are_the_default(
    workspace: Layout, run_tools: Run, files: tuple[Path, Path]
) -> None:
    traces = workspace.build / "demo" / "traces"
    traces.mkdir(parents=True)
    for role, path in zip(trace.ROLES, files, strict=True):
        shutil.copy(path, traces / f"afd-{role}-0-20261130-120000-1-1.jsonl")
        old = traces / f"afd-{role}-0-20251130-120000-1-1.jsonl"
        old.touch()
        os.utime(old, (1, 1))
    done = run_tools(workspace, "timeline")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "a"], "Both files are of the attention role"),
        (["a", "bad"], r"bad.jsonl, line 2: not a line of an AFD trace"),
        (["a", "f", "--steps", "x"], "--steps x is not of the form"),
        (["a", "f", "--steps", "900-"], "--steps 900- is not of the form"),
        (["a", "f", "--steps", "900"], "hold no such step"),
        (["a"], "It takes 2 files, not 1"),
        ([], "has no traces of both roles"),
    ],
)
def test_bad_input_is_an_error_that_tells(
    workspace: Layout,
    run_tools: Run,
    files: tuple[Path, Path],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(header("ffn")) + "\n{}\n")
    names = {"a": str(files[0]), "f": str(files[1]), "bad": str(bad)}
    done = run_tools(
        workspace, "timeline", *(names.get(each, each) for each in arguments)
    )
    assert done.returncode == 1
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_make_passes_on_what_it_is_given() -> None:
    ours = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS", "FILES")
    done = subprocess.run(
        ["make", "-n", "timeline", "FILES=a b", "ARGS=--steps 3"],
        env={name: value for name, value in os.environ.items() if name not in ours},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    words = done.stdout.split()
    assert words[words.index("tools") + 1 :] == ["timeline", "a", "b", "--steps", "3"]


# A real browser.

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)


class Browser:
    """A page in Chromium, driven over a pipe."""

    def __init__(self, output: int, input_: int) -> None:
        self.output, self.input = output, input_
        self.number = 0
        self.rest = b""
        self.session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        while True:
            found = self.receive()
            if found.get("id") == self.number:
                assert "error" not in found, found
                return found["result"]
            if found.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(found["params"]))
            if found.get("method") == "Network.requestWillBeSent":
                self.requests.append(found["params"]["request"]["url"])

    def receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.input], [], [], 1)
            assert time.monotonic() < deadline, "Chromium does not answer"
            if ready:
                data = os.read(self.input, 1 << 20)
                assert data, "Chromium has ended"
                self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Runtime", "Network", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + 60
        while not self.value("document.readyState === 'complete' && !!window.timeline"):
            assert time.monotonic() < deadline
            assert not self.errors
            time.sleep(0.1)

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    @property
    def state(self) -> dict[str, Any]:
        return self.value("timeline.state")


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    there, output = os.pipe()
    input_, back = os.pipe()
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
        "--window-size=1400,1000",
    ]
    # It reads from 3 and writes to 4.
    script = f'exec 3<&{there} 4>&{back}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *command],
        pass_fds=(there, back),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(there)
    os.close(back)
    try:
        browser = Browser(output, input_)
        yield browser
        assert not browser.errors
    finally:
        os.close(output)
        os.close(input_)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_the_page_in_a_browser(files: tuple[Path, Path], tmp_path: Path) -> None:
    outputs = timeline.write(load(files), tmp_path / "out")
    data = page_data(outputs.page.read_text())
    with chromium(tmp_path / "profile") as browser:
        browser.open(outputs.page)
        count = len(data["events"]["seq"])
        state = browser.state
        assert state["count"] == count
        # A split step fills the view.
        step = next(each for each in data["steps"] if each[0] == data["first_step"])
        assert len(step[4]) == 2
        assert state["from"] <= step[1]
        assert step[2] <= state["to"] <= step[2] + (step[2] - step[1])
        first = state["selected"]
        assert data["events"]["seq"][first] == data["first_step"]

        # There and back, by keyboard and by button.
        for _ in range(3):
            browser.press("ArrowRight")
        assert browser.state["selected"] == first + 3
        browser.press("ArrowLeft")
        browser.value("document.getElementById('previous').click()")
        assert browser.state["selected"] == first + 1
        browser.press("End")
        assert browser.state["selected"] == count - 1
        browser.press("ArrowRight")
        assert browser.state["selected"] == count - 1
        browser.press("Home")
        assert browser.state["selected"] == 0
        assert browser.state["from"] <= data["events"]["begin"][0]

        # What is selected is told, to whoever cannot see it too.
        browser.press("PageDown")
        at = browser.state["selected"]
        assert data["events"]["seq"][at] == 2
        told = browser.value("document.getElementById('detail').textContent")
        names = {key: column[at] for key, column in data["events"].items()}
        for expected in (
            f"stage {names['stage']}",
            f"layer {names['layer']} ({data['layers'][names['layer']]})",
            f"step {names['seq']}",
            f"{names['rows']} rows",
            f"{(names['end'] - names['begin']) / 1000:g} µs",
        ):
            assert expected in told
        assert browser.value(
            "document.getElementById('detail').getAttribute('aria-live')"
        )

        # Zoom keeps what is selected in view.
        before = browser.state
        browser.press("+")
        after = browser.state
        span = before["to"] - before["from"]
        assert after["to"] - after["from"] == pytest.approx(span / 2)
        assert after["from"] <= names["end"]
        assert names["begin"] <= after["to"]
        browser.press("0")
        assert browser.state["to"] - browser.state["from"] >= state["lastNs"]

        # The mouse shows the same.
        browser.value("document.getElementById('fit').click()")
        box = browser.value(
            "(r => [r.x, r.y, r.width])"
            "(document.getElementById('lanes').getBoundingClientRect())"
        )
        browser.call(
            "Input.dispatchMouseEvent",
            type="mouseMoved",
            x=box[0] + 118 + (box[2] - 118) * 0.06,
            y=box[1] + 80,
        )
        tip = browser.value("document.getElementById('tip').textContent")
        assert "compute on attention, stage 0" in tip
        assert browser.requests == [outputs.page.as_uri()]
        wide = browser.value("document.documentElement.scrollWidth <= innerWidth")
        assert wide, "it scrolls sideways"


def test_100000_events_in_a_browser(maker: Maker, tmp_path: Path) -> None:
    while sum(map(len, maker.lines.values())) < 106_000:
        maker.step(3, 4)
    outputs = timeline.write(load(maker.write()), tmp_path / "out")
    with chromium(tmp_path / "profile") as browser:
        browser.open(outputs.page)
        assert browser.state["count"] >= 100_000
        browser.press("0")
        # Everything in view is the most that can be to draw. Far from what it takes,
        # and far from what could not be used.
        drawn = browser.value(
            "(() => { const t = performance.now();"
            " for (let n = 0; n < 10; n++) timeline.draw();"
            " return (performance.now() - t) / 10; })()"
        )
        assert drawn < 500
        print(f"drawing all takes {drawn:.0f} ms")
        for _ in range(5):
            browser.press("ArrowDown")
        browser.press("End")
        assert browser.state["selected"] == browser.state["count"] - 1
