"""`patches/ports/<version>/status.toml`: how each patch fared on another release."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.errors import WorkshopError
from tools.layout import Layout

_HEAD = "# Written by `make port`; `lost` names lines that a human accepted to lose.\n"


@dataclass(frozen=True)
class Status:
    """One patch on one release.

    Attributes:
        result: One of `port_merge.RESULTS`.
        digest: `Series.patch_digest` of the patch that was ported.
        made_for: Hash of the lines of the patch that its override was made for.
        detail: What is worth knowing.
        lost: What the override does without, on purpose; see `lost_between`.
    """

    result: str
    digest: str
    made_for: str = ""
    detail: str = ""
    lost: tuple[str, ...] = ()


def status_file(layout: Layout, version: str) -> Path:
    return layout.port_overrides(version) / "status.toml"


def load_statuses(layout: Layout, version: str) -> dict[str, Status]:
    """Read it; empty if there is none.

    Raises:
        WorkshopError: It is not valid.
    """
    path = status_file(layout, version)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return {
            slug: Status(**{**facts, "lost": tuple(facts.get("lost", ()))})
            for slug, facts in data.items()
        }
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
        raise WorkshopError(
            f"{layout.relative(path)} is not valid.",
            str(error),
            "Restore it from git, or remove it; `make port` writes it.",
        ) from None


def save_statuses(layout: Layout, version: str, statuses: dict[str, Status]) -> None:
    import tomlkit

    path = status_file(layout, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = tomlkit.document()
    for slug, status in statuses.items():
        table = tomlkit.table()
        table["result"] = status.result
        table["digest"] = status.digest
        for key in ("made_for", "detail"):
            if text := getattr(status, key):
                table[key] = text
        if status.lost:
            table["lost"] = tomlkit.array()
            table["lost"].extend(status.lost)  # type: ignore[attr-defined]
            table["lost"].multiline(True)  # type: ignore[attr-defined]
        document[slug] = table
    text = _HEAD + "\n" + tomlkit.dumps(document)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
