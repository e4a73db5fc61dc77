#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write docs/features/afd_models.md: what AFD does with each MoE architecture.

Reads the sources only: which classes of the model registry reach a call of
`FusedMoEFactory`, and with which arguments. `--check` fails if the page is not what
the sources say.
"""

import argparse
import ast
import functools
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "features" / "afd_models.md"
MODELS = "vllm.model_executor.models"
_PACKAGES = (MODELS + ".", "vllm.models.")

# Its TESTED names the architectures whose logits test_role_models.py, beside it,
# compares with those of the whole model.
TINY_MODELS = ROOT / "tests" / "model_executor" / "afd" / "tiny_models.py"

# Registry tables of which AFD takes no model, and why.
_REFUSED_TABLES = {
    "_EMBEDDING_MODELS": "pooling model",
    "_LATE_INTERACTION_MODELS": "pooling model",
    "_REWARD_MODELS": "pooling model",
    "_TOKEN_CLASSIFICATION_MODELS": "pooling model",
    "_SEQUENCE_CLASSIFICATION_MODELS": "pooling model",
    "_MULTIMODAL_MODELS": "multimodal model",
    "_SPECULATIVE_DECODING_MODELS": "draft model of speculative decoding",
    "_TRANSFORMERS_BACKEND_MODELS": "Transformers modeling backend",
    "_TRANSFORMERS_SUPPORTED_MODELS": "Transformers modeling backend",
}
# Arguments of FusedMoEFactory with which a layer is more than a function of hidden
# states and router logits.
_REFUSED_ARGUMENTS = {
    "runner_cls": "has a MoE runner of its own",
    "routed_input_transform": "latent MoE",
    "routed_output_transform": "latent MoE",
    "zero_expert_type": "zero experts",
    "hash_indices_table": "routes by token ids",
    "custom_routing_function": "routes with a method of the model",
}


@dataclass
class Facts:
    """What the sources say about the MoE layers of a class and all it refers to.

    Attributes:
        calls: Arguments of each call of FusedMoEFactory.
        makes_layers: Whether `make_layers` is called.
        transformers: Whether it is the Transformers modeling backend.

    """

    calls: list[dict[str, ast.expr]] = field(default_factory=list)
    makes_layers: bool = False
    transformers: bool = False


def _path(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.cache
def _symbols(module: str) -> dict[str, list[ast.AST | tuple[str, str]]]:
    """Classes and functions of a module, and where imported names come from."""
    symbols: dict[str, list[ast.AST | tuple[str, str]]] = {}
    if (path := _path(module)) is None:
        return symbols
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                source = ".".join(parts + ([source] if source else []))
            for name in node.names:
                entry = (source, name.name)
                symbols.setdefault(name.asname or name.name, []).append(entry)
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            symbols.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    symbols.setdefault(target.id, []).append(node)
    return symbols


@functools.cache
def _uses(module: str, name: str) -> tuple[list[tuple[str, str]], Facts]:
    """What a symbol refers to among model classes, and its own facts."""
    facts = Facts(transformers=module.startswith(f"{MODELS}.transformers"))
    refers: list[tuple[str, str]] = []
    for entry in _symbols(module).get(name, []):
        if isinstance(entry, tuple):
            if entry[1] == "make_layers":
                facts.makes_layers = True
            elif entry[0].startswith(_PACKAGES):
                refers.append(entry)
            continue
        for node in ast.walk(entry):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                refers.append((module, node.id))
            elif (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "FusedMoEFactory"
            ):
                call = {k.arg: k.value for k in node.keywords if k.arg is not None}
                if not _is_method(entry, call.get("custom_routing_function")):
                    call.pop("custom_routing_function", None)
                facts.calls.append(call)
    return refers, facts


def _is_method(owner: ast.AST, value: ast.expr | None) -> bool:
    """Whether a value is a method of `owner` that needs its `self`."""
    if not isinstance(value, ast.Attribute):
        return False
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name == value.attr
        and not any(getattr(d, "id", "") == "staticmethod" for d in node.decorator_list)
        for node in ast.walk(owner)
    )


def facts_of(module: str, name: str) -> Facts:
    """Facts about a class, its bases and every model class or function it names."""
    facts = Facts()
    todo, done = [(module, name)], set[tuple[str, str]]()
    while todo:
        symbol = todo.pop()
        if symbol in done:
            continue
        done.add(symbol)
        refers, own = _uses(*symbol)
        todo += refers
        facts.calls += own.calls
        facts.makes_layers |= own.makes_layers
        facts.transformers |= own.transformers
    return facts


def registry() -> dict[str, tuple[str, str, str]]:
    """Architecture: table, module and class."""
    path = _path(f"{MODELS}.registry")
    assert path is not None
    found: dict[str, tuple[str, str, str]] = {}
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        table = getattr(node.targets[0], "id", "")
        if table != "_TEXT_GENERATION_MODELS" and table not in _REFUSED_TABLES:
            continue
        for key, value in zip(node.value.keys, node.value.values):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                module, name = (ast.literal_eval(item) for item in value.elts)
                module = module if "." in module else f"{MODELS}.{module}"
                found.setdefault(key.value, (table, module, name))
    return found


def tested() -> frozenset[str]:
    for node in ast.parse(TINY_MODELS.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == (
            "TESTED"
        ):
            return frozenset(ast.literal_eval(node.value))
    raise ValueError(f"{TINY_MODELS} has no TESTED")


def _given(value: ast.expr | None) -> str:
    """Whether an argument is given: 'no', 'maybe' or 'yes'."""
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return "no"
    if isinstance(value, ast.IfExp):
        sides = {_given(value.body), _given(value.orelse)}
        return "maybe" if len(sides) > 1 else sides.pop()
    return "yes"


def rows() -> list[tuple[str, str, str, str]]:
    """Architecture, role of the gate, status and remark, sorted."""
    result = []
    run = tested()
    for architecture, (table, module, name) in registry().items():
        facts = facts_of(module, name)
        if not facts.calls and not (
            facts.transformers and "MoE" in name and table == "_TEXT_GENERATION_MODELS"
        ):
            continue
        gates = {_given(call.get("gate")) for call in facts.calls}
        gate = {frozenset(["yes"]): "FFN", frozenset(["no"]): "attention"}.get(
            frozenset(gates), "FFN or attention"
        )
        reasons, remarks = [], []
        if table in _REFUSED_TABLES:
            reasons.append(_REFUSED_TABLES[table])
        if facts.transformers:
            reasons.append(_REFUSED_TABLES["_TRANSFORMERS_BACKEND_MODELS"])
        elif not facts.makes_layers:
            reasons.append("its decoder layers are not built by `make_layers`")
        for argument, reason in _REFUSED_ARGUMENTS.items():
            given = {_given(call.get(argument)) for call in facts.calls}
            # A latent MoE is a matter of the model's config.
            if given == {"yes"} and reason != "latent MoE":
                reasons.append(reason)
            elif given != {"no"}:
                remarks.append(f"refused where a model has it: {reason}")
        if reasons:
            status, remarks, gate = "refused", reasons, "-"
        elif architecture in run:
            status = "tested"
        else:
            status = "same code path, not tested"
        remark = "; ".join(dict.fromkeys(remarks))
        result.append((architecture, gate, status, remark))
    return sorted(result, key=lambda row: row[0].lower())


def page() -> str:
    lines = [
        "<!-- Written by tools/generate_afd_model_docs.py. -->",
        "# Models for attention-FFN disaggregation",
        "",
        "Attention-FFN disaggregation (`--afd-config`) cuts a model at its MoE layers.",
        "This is what it does with each architecture in which vLLM can build one, and",
        "the role that runs the gate by default. A model without any is refused.",
        "",
        "- *tested*: its logits are compared with those of the whole model.",
        "- *same code path, not tested*: nothing in its source stands against it.",
        "- *refused*: the server ends at start with an error that names the reason.",
        "",
        "| Architecture | Gate | Status | Remark |",
        "| --- | --- | --- | --- |",
    ]
    for architecture, gate, status, remark in rows():
        lines.append(f"| `{architecture}` | {gate} | {status} | {remark or '-'} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is out of date; run {Path(__file__).name}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
