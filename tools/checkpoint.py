"""Makes tiny seeded MoE checkpoints to serve and to test with.

The weights are random but wide enough apart that greedy tokens are well defined. Which
experts a token goes to is well defined, too (`route_by_token`): a random router would
have some two experts that are as good as equal, and how a CPU rounds, or where a step
is split, would decide between them.
Torch and transformers come with the built environment, so the work is done by its
interpreter: `python -m tools.checkpoint NAME FOLDER`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.errors import WorkshopError
from tools.layout import Layout, venv_python
from tools.ui import step

STAMP = "workshop-recipe"
DEFAULT = "tiny-qwen3-moe"

_TIMEOUT_S = 300
# Raised when the code below writes other files from the same recipe.
_FORMAT = 2
# Of the embedding's part that the routers read, from minus to plus, and of the routers:
# neighbouring experts have logits 0.1 to 3 apart then.
_ROUTING_AMPLITUDE = 2.0
_ROUTER_SCALE = 8.0
# Of a bias of the experts' scores, which are 0.03 apart or more.
_BIAS_SCALE = 0.02

# Bytes that UTF-8 never uses stand for the begin and the end of a text.
_BOS_BYTE, _EOS_BYTE = "þ", "ÿ"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Recipe:
    """What decides a checkpoint's bytes.

    Attributes:
        model: Prefix of the transformers classes `<model>Config` and
            `<model>ForCausalLM`.
        config: Arguments of the config.
        seed: Of the random weights.
    """

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def stamp(self) -> str:
        facts = {"format": _FORMAT, "chat": CHAT_TEMPLATE, **asdict(self)}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# The seeds are such that no prompt of tests/e2e and tests/gpu leads to two best tokens
# that are as good as equal; the tests look.
RECIPES = {
    "tiny-qwen3-moe": Recipe(
        "Qwen3Moe",
        _COMMON
        | {
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
        seed=5,
    ),
    # Most of it are experts: 384 MiB in fp32.
    "bulky-qwen3-moe": Recipe(
        "Qwen3Moe",
        _COMMON
        | {
            "intermediate_size": 512,
            "moe_intermediate_size": 2048,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
    "tiny-mixtral": Recipe(
        "Mixtral",
        _COMMON
        | {
            "intermediate_size": 256,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        seed=2,
    ),
    # MLA kernels know only some head sizes: 512 + 64 is one of them.
    "tiny-deepseek-v2": Recipe(
        "DeepseekV2",
        _COMMON
        | {
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
}


def ensure(layout: Layout, name: str = DEFAULT, python: Path | None = None) -> Path:
    """Folder of a checkpoint, which is made if it is not there or out of date.

    Args:
        layout: Checkout; the folder is under its `build/models`.
        name: Key of `RECIPES`.
        python: Interpreter with torch and transformers; that of `.venv` unless given.

    Raises:
        WorkshopError: The name is unknown or the interpreter failed; names both.
    """
    recipe = _recipe(name)
    folder = layout.build / "models" / name
    if _is_current(folder, recipe):
        return folder
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.with_suffix(".lock"), timeout=_TIMEOUT_S):
            if not _is_current(folder, recipe):
                with step(f"Making checkpoint {layout.relative(folder)}"):
                    _make(layout, name, folder, python or venv_python(layout.venv))
    except Timeout:
        raise WorkshopError(
            f"Another process has been making {layout.relative(folder)} for "
            f"{_TIMEOUT_S} s.",
            todo="End that process and run again.",
        ) from None
    return folder


def write(name: str, folder: Path) -> None:
    """Write weights, config and tokenizer. Needs torch and transformers."""
    import torch
    import transformers

    recipe = _recipe(name)
    vocab = _byte_vocab()
    torch.manual_seed(recipe.seed)
    config = getattr(transformers, f"{recipe.model}Config")(
        **recipe.config, bos_token_id=vocab[_BOS_BYTE], eos_token_id=vocab[_EOS_BYTE]
    )
    model = getattr(transformers, f"{recipe.model}ForCausalLM")(config)
    route_by_token(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer(vocab).save_pretrained(folder)


def route_by_token(model: Any) -> None:
    """Have the token alone decide on its experts, by a wide margin.

    The last elements of the hidden state, one per expert, are written by the embedding
    and by no layer. There each token has evenly spaced levels in an order of its own,
    and each router takes them for its logits, in an order of its own. A norm scales all
    of them alike, so the order of a token's experts is never a matter of rounding.
    Neither is that of groups of experts: those of a group have neighbouring levels.

    Args:
        model: A transformers model whose routers are named `mlp.gate`. Changed in
            place.
    """
    import torch

    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    routers = [
        tensor for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")
    ]
    experts = routers[0].shape[0]
    groups = getattr(model.config, "n_group", None) or 1
    levels = torch.linspace(-_ROUTING_AMPLITUDE, _ROUTING_AMPLITUDE, experts)
    embedding = model.get_input_embeddings().weight
    hidden = embedding.shape[1:]
    with torch.no_grad():
        for row in embedding:
            row[-experts:] = levels[_grouped_permutation(experts, groups)]
        for router in routers:
            order = _grouped_permutation(experts, groups)
            router.zero_()
            router[:, -experts:] = _ROUTER_SCALE * torch.eye(experts)[order]
        for name, tensor in tensors.items():
            if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
                tensor[..., -experts:, :] = 0
            elif name.endswith("norm.weight") and tensor.shape == hidden:
                tensor[-experts:] = 1
            elif name.endswith("e_score_correction_bias"):
                tensor *= _BIAS_SCALE


def _grouped_permutation(experts: int, groups: int) -> Any:
    """Of groups of neighbours, and of those in each."""
    import torch

    rows = torch.arange(experts).view(groups, -1)[torch.randperm(groups)]
    return torch.cat([row[torch.randperm(len(row))] for row in rows])


def _byte_vocab() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    return {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}


def _tokenizer(vocab: dict[str, int]) -> Any:
    """One token per byte, so that any text can be sent and any output decoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE
    )


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise WorkshopError(
            f"There is no tiny checkpoint named {name!r}.",
            f"There are: {', '.join(RECIPES)}.",
        )
    return RECIPES[name]


def _is_current(folder: Path, recipe: Recipe) -> bool:
    try:
        return (folder / STAMP).read_text(encoding="utf-8") == recipe.stamp
    except FileNotFoundError:
        return False


def _make(layout: Layout, name: str, folder: Path, python: Path) -> None:
    """Write beside `folder` and rename, so that no half-written folder is seen."""
    temporary = folder.with_name(f".{name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    log = layout.reports / f"checkpoint-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "tools.checkpoint", name, str(temporary)]
    try:
        with log.open("wb") as output:
            code = subprocess.run(
                command,
                cwd=Path(__file__).resolve().parent.parent,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            ).returncode
        why = f"exit status {code}: {_last_line(log)}" if code else ""
    except FileNotFoundError:
        why = f"{layout.relative(python)} does not exist."
    except subprocess.TimeoutExpired:
        why = f"It took longer than {_TIMEOUT_S} s."
    if why:
        shutil.rmtree(temporary, ignore_errors=True)
        raise WorkshopError(
            f"The checkpoint {name} could not be made.",
            f"{why}\nIts output is in {layout.relative(log)}.",
            "Run `make build` to mend the environment, then run again.",
        )
    (temporary / STAMP).write_text(RECIPES[name].stamp, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
