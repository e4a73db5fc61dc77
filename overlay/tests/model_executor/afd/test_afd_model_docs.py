# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tests.model_executor.afd.tiny_models import TESTED, TINY_MODELS

ROOT = Path(__file__).resolve().parents[3]


def load_generator() -> ModuleType:
    """The script that writes docs/features/afd_models.md."""
    path = ROOT / "tools" / "generate_afd_model_docs.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    # Its dataclass looks for its module.
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs = load_generator()


def test_page_says_what_the_sources_say():
    assert docs.PAGE.read_text() == docs.page()


def test_every_tested_architecture_has_a_checkpoint():
    assert set(TINY_MODELS) >= set(TESTED)
    assert docs.tested() == set(TESTED)


def test_statuses():
    table = {row[0]: row[1:] for row in docs.rows()}
    assert table["Qwen3MoeForCausalLM"] == ("FFN", "tested", "")
    assert table["MixtralForCausalLM"] == ("attention", "tested", "")
    assert table["DeepseekV4ForCausalLM"][1:] == ("refused", "routes by token ids")
    assert table["FlexOlmoForCausalLM"][1] == "refused"
    assert table["Qwen3VLMoeForConditionalGeneration"][1] == "refused"
    assert "LlamaForCausalLM" not in table
