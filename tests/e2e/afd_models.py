"""Architectures that AFD is tested with end to end, and their tiny checkpoints.

The checkpoints are those of the series' own tests, so that there is one list: seeded,
fp32, a few MiB each, without tokenizer files. They are made once and kept in
`build/models`. With MLA, whose rounding is coarse, the token decides on its experts
(`tools.checkpoint.route_by_token`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tools import checkpoint
from tools.layout import Layout

_RECIPES = Path("tests/model_executor/afd/tiny_models.py")
_TIMEOUT_S = 300
_STAMP = "afd-recipe"
_MAKE = """
import sys
from pathlib import Path
tests, architecture, folder, route = sys.argv[1:]
sys.path[:0] = [tests, "."]
from tiny_models import make_tiny_model
make_tiny_model(architecture, Path(folder))
if route == "True":
    import torch, transformers
    from tools.checkpoint import route_by_token
    model = getattr(transformers, architecture).from_pretrained(folder)
    torch.manual_seed(2)
    route_by_token(model)
    model.save_pretrained(folder)
"""


@dataclass(frozen=True)
class AFDModel:
    """An architecture to serve with both roles.

    Attributes:
        architecture: As in vLLM's registry and transformers.
        gate_on_ffn: Whether the FFN role runs the gate by default.
        mla: Whether it attends with MLA: its logprobs under DBO differ a little more.
        dtype: What it is run in. Sinks of attention are bfloat16 on a CPU.
    """

    architecture: str
    gate_on_ffn: bool = False
    mla: bool = False
    dtype: str = "float32"

    @property
    def gate_placements(self) -> tuple[str, ...]:
        """Values of `gate_placement` that differ in what they do."""
        return ("auto", "attention") if self.gate_on_ffn else ("auto",)


AFD_MODELS = (
    AFDModel("Qwen3MoeForCausalLM", gate_on_ffn=True),
    AFDModel("DeepseekV2ForCausalLM", gate_on_ffn=True, mla=True),
    AFDModel("DeepseekV3ForCausalLM", gate_on_ffn=True, mla=True),
    AFDModel("MixtralForCausalLM"),
    AFDModel("Qwen2MoeForCausalLM"),
    AFDModel("Glm4MoeForCausalLM"),
    AFDModel("Glm4MoeLiteForCausalLM", mla=True),
    AFDModel("OlmoeForCausalLM"),
    AFDModel("GraniteMoeForCausalLM"),
    AFDModel("GraniteMoeSharedForCausalLM"),
    AFDModel("GptOssForCausalLM", dtype="bfloat16"),
    AFDModel("Ernie4_5_MoeForCausalLM"),
    AFDModel("AfmoeForCausalLM"),
    AFDModel("Cohere2MoeForCausalLM"),
    AFDModel("Gemma4ForCausalLM"),
)
# Refused at start, by what the error says.
REFUSED = {
    "FlexOlmoForCausalLM": "FlexOlmoForCausalLM",
    "LongcatFlashForCausalLM": "zero experts",
}


def ensure(
    layout: Layout, architecture: str, python: Path, tree: Path | None = None
) -> Path:
    """Folder of a checkpoint, which is made if it is not there or out of date.

    Args:
        layout: Checkout; the folder is under its `build/models`.
        architecture: Of `AFD_MODELS` or `REFUSED`.
        python: Interpreter with torch and transformers.
        tree: Patched tree; `build/vllm` unless given.
    """
    recipes = (tree or layout.build / "vllm") / _RECIPES
    sources = [recipes, Path(checkpoint.__file__), Path(__file__)]
    facts = b"".join(source.read_bytes() for source in sources)
    stamp = hashlib.sha256(facts).hexdigest()
    route = any(each.architecture == architecture and each.mla for each in AFD_MODELS)
    folder = layout.build / "models" / f"afd-{architecture}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock"), timeout=_TIMEOUT_S):
        mark = folder / _STAMP
        if mark.is_file() and mark.read_text() == stamp:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(
            [python, "-c", _MAKE, recipes.parent, architecture, folder, str(route)],
            cwd=Path(checkpoint.__file__).parent.parent,
            check=True,
            timeout=_TIMEOUT_S,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        mark.write_text(stamp)
    return folder
