"""Files from the package index, known by their sha256."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.errors import WorkshopError
from tools.layout import Layout
from tools.pin import Artifact
from tools.ui import byte_progress, say, step

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage, PyPISimple

_PART = ".part-"
# Seconds to connect, and without any byte received.
_TIMEOUT = (20.0, 60.0)
_RETRIES = 3


def download(layout: Layout, artifact: Artifact) -> Path:
    """Path of a file whose sha256 is the pinned one.

    It comes from the cache, without any network, or else from the index that pip
    is configured to use. A cached file with another sha256 is set aside.

    Raises:
        WorkshopError: The index cannot be reached, has no such file, or gives
            other bytes; nothing is kept then.
    """
    target = layout.cache / artifact.filename
    if target.is_file():
        found = sha256_of(target)
        if found == artifact.sha256:
            return target
        aside = target.with_name(f"{target.name}.bad")
        size = target.stat().st_size
        target.replace(aside)
        say(
            f"{target} is not the pinned file: it has {size} bytes with sha256 "
            f"{found}, vllm.pin says {artifact.sha256}. It is now {aside.name}."
        )
    try:
        layout.cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkshopError(
            f"The download cache {layout.cache} cannot be made.",
            str(error),
            "Mend that path, or set VLLM_AFD_CACHE to another folder.",
        ) from None
    _remove_leftovers(layout.cache)
    part = layout.cache / f"{_PART}{os.getpid()}-{artifact.filename}"
    try:
        with step(f"Downloading {artifact.filename}"):
            _get(artifact, part, target)
        found = sha256_of(part)
        if found != artifact.sha256:
            raise WorkshopError(
                f"{artifact.filename} from the package index is not the pinned file.",
                f"Its sha256 is {found} ({part.stat().st_size} bytes); "
                f"vllm.pin says {artifact.sha256}.",
                "Nothing was kept. Run again; if it stays so, the index or the pin "
                "is wrong.",
            )
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _get(artifact: Artifact, part: Path, target: Path) -> None:
    import requests
    from pypi_simple import NoSuchProjectError

    by_hand = f"Or put the file at {target} yourself; its sha256 is checked."
    try:
        with _client() as client:
            package = _find(client, artifact, by_hand)
            # Our own sha256 is the one that counts; the index's adds nothing.
            client.download_package(
                package, part, verify=False, progress=_tracker, timeout=_TIMEOUT
            )
    except NoSuchProjectError:
        raise WorkshopError(
            f"The package index has no project {artifact.project}.", todo=by_hand
        ) from None
    except (requests.RequestException, OSError) as error:
        raise WorkshopError(
            f"{artifact.filename} could not be downloaded.",
            _without_password(str(error)),
            f"Check the network and pip's index settings, then run again.\n{by_hand}",
        ) from None


def _find(client: PyPISimple, artifact: Artifact, by_hand: str) -> DistributionPackage:
    page = client.get_project_page(artifact.project, timeout=_TIMEOUT)
    for package in page.packages:
        if package.filename == artifact.filename:
            return package
    raise WorkshopError(
        f"The package index has no {artifact.filename}.",
        f"It has {len(page.packages)} other files of {artifact.project}.",
        by_hand,
    )


def _client() -> PyPISimple:
    """Client of the index that pip would use, else of the library's own default."""
    import requests
    from pypi_simple import PyPISimple
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    settings = pip_settings()
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        raise WorkshopError(
            "pip is configured to use no package index (no-index).",
            todo="Unset it, or put the file into the cache by hand.",
        )
    session = requests.Session()
    retry = Retry(_RETRIES, backoff_factor=0.5, status_forcelist=(500, 502, 503, 504))
    session.mount("http://", HTTPAdapter(max_retries=retry))
    session.mount("https://", HTTPAdapter(max_retries=retry))
    if "cert" in settings:
        session.verify = settings["cert"]
    if "index-url" in settings:
        return PyPISimple(settings["index-url"], session=session)
    return PyPISimple(session=session)


def pip_settings() -> dict[str, str]:
    """pip's own settings for downloads, from its files and its environment."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found: dict[str, str] = {}
    # A later section outranks an earlier one.
    for section in ("global", "download", ":env:"):
        for line in done.stdout.splitlines():
            match = re.fullmatch(rf"{section}\.([a-z-]+)='(.*)'", line.strip())
            if match:
                found[match[1]] = match[2]
    return found


class _Tracker:
    def __init__(self, advance: Any) -> None:
        self.update = advance


@contextmanager
def _tracker(total: int | None) -> Iterator[_Tracker]:
    with byte_progress("downloaded", total) as advance:
        yield _Tracker(advance)


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]+@", "//***@", text)


def _remove_leftovers(cache: Path) -> None:
    """Remove parts whose process is gone."""
    for left in cache.glob(f"{_PART}*"):
        pid = left.name.removeprefix(_PART).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            left.unlink(missing_ok=True)
