"""Traces of both AFD roles, made by a schedule."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

US = 1000
LAYERS = ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]
SEND, HANDOFF = 10 * US, 2 * US


def header(role: str, **changes: Any) -> dict[str, Any]:
    return {
        "type": "header",
        "format": "vllm-afd-trace",
        "version": 1,
        "role": role,
        "rank": 0,
        "pid": 1,
        "host": "one",
        "boot_id": "a-boot",
        "peer": "the peer",
        "vllm_version": "0.30.0",
        "layers": LAYERS,
        "monotonic_ns": 0,
        "realtime_ns": 10**18,
    } | changes


@dataclass
class Maker:
    """Writes the traces of steps that run by a schedule.

    Attributes:
        attention, ffn: Nanoseconds of a computation.
        skew: What FFN's clock is ahead.
    """

    folder: Path
    attention: int = 100 * US
    ffn: int = 80 * US
    skew: int = 0
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)
    now: int = 1_000_000
    seq: int = 0
    lines: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"attention": [], "ffn": []}
    )

    def put(self, role: str, **line: Any) -> None:
        for key in ("begin_ns", "end_ns"):
            if role == "ffn" and key in line:
                line[key] += self.skew
        self.lines[role].append(line)

    def event(
        self, role: str, name: str, begin: int, end: int, layer: int, stage: int
    ) -> None:
        self.put(
            role,
            type="event",
            event=name,
            begin_ns=begin,
            end_ns=end,
            seq=self.seq,
            layer=layer,
            stage=stage,
            rows=self.rows[stage],
        )

    def step(self, *rows: int, kind: str = "eager", slower: int = 0) -> None:
        """Run a step of one or two stages; `slower` is added to each computation of
        attention."""
        self.seq += 1
        self.rows = rows
        begin = at = self.now
        mine = self.attention + slower
        stages = range(len(rows))
        sent, posted, answer = {}, dict.fromkeys(stages, begin), {}
        ffn_free = begin
        for layer in range(len(LAYERS) + 1):
            for stage in stages:
                if layer:
                    if len(rows) > 1:
                        back = at + HANDOFF
                        self.event(
                            "attention", "yield", sent[stage], back, layer - 1, stage
                        )
                        at = back
                    got = max(at, answer[stage])
                    self.event("attention", "wait", at, got, layer - 1, stage)
                    self.event("attention", "recv", sent[stage], got, layer - 1, stage)
                    at = got
                self.event("attention", "compute", at, at + mine, layer, stage)
                at += mine
                if layer == len(LAYERS):
                    continue
                self.event("attention", "send", at, at + SEND, layer, stage)
                at = sent[stage] = at + SEND
                wait = ffn_free
                ffn_free = max(ffn_free, at)
                self.event("ffn", "wait", wait, ffn_free, layer, stage)
                self.event("ffn", "recv", posted[stage], ffn_free, layer, stage)
                self.event(
                    "ffn", "compute", ffn_free, ffn_free + self.ffn, layer, stage
                )
                ffn_free += self.ffn
                posted[stage] = ffn_free
                self.event("ffn", "send", ffn_free, ffn_free + SEND, layer, stage)
                ffn_free = answer[stage] = ffn_free + SEND
        for role, end in (("attention", at), ("ffn", ffn_free)):
            self.put(
                role,
                type="step",
                kind=kind,
                begin_ns=begin,
                end_ns=end,
                seq=self.seq,
                stage_tokens=list(rows),
            )
        self.now = at + 50 * US

    def write(self) -> tuple[Path, Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        for role, lines in self.lines.items():
            lines = [
                header(role, **self.headers.get(role, {})),
                *lines,
                {"type": "end", "monotonic_ns": self.now},
            ]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (self.folder / f"{role}.jsonl").write_text(text)
        return self.folder / "attention.jsonl", self.folder / "ffn.jsonl"
