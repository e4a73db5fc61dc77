"""What all benchmarks need to tell a result: where, on what machine, how far spread."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.layout import Layout
from tools.ui import say


def output_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a program whose first argument says where the result is to be written."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("output", type=Path, help="Where the result is written.")
    return parser


def output_file(description: str | None) -> Path:
    """Where the result is to be written: the program's one argument."""
    return output_parser(description).parse_args().output


def machine() -> dict[str, Any]:
    """The machine, without anything that names it."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def spread(ratios: Sequence[float]) -> dict[str, float | list[float]]:
    """Median, its 95 % interval by rank (as in a sign test), and quartiles."""
    ordered = sorted(ratios)
    low, median, high = statistics.quantiles(ordered, n=4)
    middle, reach = (len(ordered) - 1) / 2, 0.98 * len(ordered) ** 0.5
    first, last = max(0, int(middle - reach)), -int(-(middle + reach) // 1)
    interval = ordered[first], ordered[min(last, len(ordered) - 1)]
    return {
        "median": round(median, 4),
        "median_95": [round(value, 4) for value in interval],
        "quartiles": [round(low, 4), round(high, 4)],
    }


def keep(layout: Layout, output: Path, result: dict[str, Any]) -> None:
    """Write a result where it is kept."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    say(f"    written to {layout.relative(output)}")
