"""What the README says of the series and of the verbs is so."""

from __future__ import annotations

import re

from tools.layout import Layout
from tools.series import load_series

LAYOUT = Layout.default()
README = (LAYOUT.root / "README.md").read_text()


def test_it_lists_every_patch_in_order() -> None:
    (table,) = re.findall(r"\| patch \| makes \|\n((?:\|.*\n)+)", README)
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE)
    assert listed == list(load_series(LAYOUT).slugs)


def test_every_target_it_names_is_there() -> None:
    makefile = (LAYOUT.root / "Makefile").read_text()
    rules = re.findall(r"^([a-z -]+):", makefile, re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    named = set(re.findall(r"`(?:[A-Z_0-9]+=\S+ )*make ([a-z-]+)", README))
    assert named >= {"apply", "test", "demo"}
    assert named <= targets
