"""The tiny checkpoints: when they are made, and that no half-made one is seen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools import checkpoint
from tools.errors import WorkshopError
from tools.layout import Layout

if TYPE_CHECKING:
    import torch

NAME = checkpoint.DEFAULT


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def interpreter(folder: Path, script: str) -> Path:
    """An interpreter that runs `script` instead; $4 is the folder to write."""
    python = folder / "fake-python"
    python.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{script}\n")
    python.chmod(0o755)
    return python


def runs(folder: Path) -> int:
    return (folder / "runs").read_text().count("run")


WRITES = 'mkdir "$4" && echo weights > "$4/model.safetensors"'


def test_made_once(layout: Layout) -> None:
    python = interpreter(layout.root, WRITES)
    folder = checkpoint.ensure(layout, NAME, python)
    assert (folder / "model.safetensors").read_text() == "weights\n"
    assert folder == layout.root / "build" / "models" / NAME
    before = (folder / "model.safetensors").stat()
    assert checkpoint.ensure(layout, NAME, python) == folder
    assert runs(layout.root) == 1
    assert (folder / "model.safetensors").stat() == before


def test_made_again_when_the_recipe_changes(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter(layout.root, WRITES)
    folder = checkpoint.ensure(layout, NAME, python)
    (folder / "old").touch()
    other = checkpoint.Recipe("Qwen3Moe", {"hidden_size": 128})
    monkeypatch.setitem(checkpoint.RECIPES, NAME, other)
    checkpoint.ensure(layout, NAME, python)
    assert runs(layout.root) == 2
    assert not (folder / "old").exists()


def test_every_part_of_a_recipe_counts() -> None:
    recipe = checkpoint.Recipe("Mixtral", {"hidden_size": 256})
    others = [
        checkpoint.Recipe("Qwen3Moe", {"hidden_size": 256}),
        checkpoint.Recipe("Mixtral", {"hidden_size": 128}),
        checkpoint.Recipe("Mixtral", {"hidden_size": 256}, seed=1),
    ]
    assert len({recipe.stamp, *(other.stamp for other in others)}) == 4


def test_a_failure_leaves_nothing_and_keeps_the_old_one(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.ensure(layout, NAME, interpreter(layout.root, WRITES))
    other = checkpoint.Recipe("Qwen3Moe", seed=7)
    monkeypatch.setitem(checkpoint.RECIPES, NAME, other)
    fails = interpreter(layout.root, f"{WRITES}; echo no torch here; exit 3")
    with pytest.raises(WorkshopError) as caught:
        checkpoint.ensure(layout, NAME, fails)
    assert "exit status 3: no torch here" in caught.value.why
    assert "make build" in caught.value.todo
    assert (folder / "model.safetensors").exists()
    assert {path.name for path in folder.parent.iterdir()} == {NAME, f"{NAME}.lock"}


def test_left_overs_of_a_killed_run_do_not_disturb(layout: Layout) -> None:
    left = layout.build / "models" / f".{NAME}.tmp"
    left.mkdir(parents=True)
    (left / "half").touch()
    folder = checkpoint.ensure(layout, NAME, interpreter(layout.root, WRITES))
    assert not (folder / "half").exists()


def test_a_missing_interpreter_is_named(layout: Layout) -> None:
    with pytest.raises(WorkshopError, match=r"could not be made") as caught:
        checkpoint.ensure(layout, NAME)
    assert ".venv/bin/python" in caught.value.why


def test_an_unknown_name_lists_the_known(layout: Layout) -> None:
    with pytest.raises(WorkshopError) as caught:
        checkpoint.ensure(layout, "tiny-gpt2", Path(sys.executable))
    assert "tiny-gpt2" in caught.value.what
    assert "tiny-mixtral" in caught.value.why


@pytest.mark.built
def test_the_same_seed_gives_the_same_weights_and_a_chat_template(
    layout: Layout,
) -> None:
    from transformers import AutoTokenizer

    python = Path(sys.executable)
    folder = checkpoint.ensure(layout, NAME, python)
    first = (folder / "model.safetensors").read_bytes()
    (folder / checkpoint.STAMP).unlink()
    checkpoint.ensure(layout, NAME, python)
    assert (folder / "model.safetensors").read_bytes() == first
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "any text: é, 中, \x00"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "user: hi\nassistant: "


def router_logits(folder: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """(tokens, experts) of each router."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    logits: list[torch.Tensor] = []
    for path, module in model.named_modules():
        if path.endswith("mlp.gate"):
            module.register_forward_pre_hook(
                lambda gate, args: logits.append(
                    (args[0].view(-1, args[0].shape[-1]) @ gate.weight.T).detach()
                )
            )
    model(tokens)
    return logits


@pytest.mark.built
@pytest.mark.parametrize(
    "name", sorted(checkpoint.RECIPES.keys() - {"bulky-qwen3-moe"})
)
def test_the_token_alone_decides_on_its_experts(layout: Layout, name: str) -> None:
    """Else two experts could be as good as equal, and rounding would decide."""
    import torch

    folder = checkpoint.ensure(layout, name, Path(sys.executable))
    tokens = torch.randint(256, (1, 300), generator=torch.Generator().manual_seed(0))
    logits = router_logits(folder, tokens)
    assert len(logits) == 4 - (name == "tiny-deepseek-v2")
    orders = [layer.argsort(-1) for layer in logits]
    for layer, order in zip(logits, orders, strict=True):
        assert layer.sort(-1).values.diff().min() > 0.05
        # The two best of different tokens are different ones.
        assert len(order[:, -2:].unique(dim=0)) > 40
        for token in tokens.unique():
            assert len(order[tokens[0] == token].unique(dim=0)) == 1
    assert not all(torch.equal(order, orders[0]) for order in orders[1:])


@pytest.mark.built
def test_neither_is_the_order_of_groups_a_matter_of_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's score is the sum of its two best experts'."""
    import torch

    deepseek = checkpoint.RECIPES["tiny-deepseek-v2"].config
    recipe = checkpoint.Recipe("DeepseekV3", deepseek | {"n_group": 4, "topk_group": 2})
    monkeypatch.setitem(checkpoint.RECIPES, "grouped", recipe)
    checkpoint.write("grouped", tmp_path)
    tokens = torch.randint(256, (1, 300), generator=torch.Generator().manual_seed(0))
    for layer in router_logits(tmp_path, tokens):
        scores = layer.sigmoid().view(-1, 4, 2)
        groups = scores.sum(-1)
        assert groups.sort(-1).values.diff().min() > 0.05
        assert len(groups.argsort(-1)[:, -2:].unique(dim=0)) == 12
        assert scores.flatten(1).sort(-1).values.diff().min() > 0.03
