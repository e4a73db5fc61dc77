"""What upstream's contribution rules ask of a patch, as far as a program can tell."""

from __future__ import annotations

import re

TITLE = re.compile(r"(\[[^][]+\])+ +\S.*")
