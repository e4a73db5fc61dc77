"""The manifests and commands of docs/deployment.md, rendered and parsed.

Nothing is deployed. The flags go through the parser of the patched vLLM, which also
makes a config of them, for the tiny model.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import checkpoint
from tools.layout import Layout, venv_python

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/deployment.md"
COMPOSE = ROOT / "docs/deployment/compose.yaml"
KUBERNETES = ROOT / "docs/deployment/leaderworkerset.yaml"
ROLES = ("attention", "ffn")

# What an operator would set.
VARIABLES = {
    "VLLM_AFD_IMAGE": "an-image",
    "VLLM_AFD_MODEL": "/data/a-model",
    "VLLM_AFD_MODEL_NAME": "a-name",
    "VLLM_AFD_SECRET": "a-secret",
    "VLLM_AFD_HOST": "10.0.0.2",
}
# What LeaderWorkerSet gives every container.
GROUP = {"LWS_LEADER_ADDRESS": "afd-0.afd.default"}


@dataclass(frozen=True)
class Container:
    """A role, as something starts it.

    Attributes:
        words: Arguments of `vllm serve`.
        env: Variables, those from a Secret as `secret NAME/KEY`.
        spec: What the manifest says of it; of a pod, with its `volumes`.
    """

    role: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def port(self) -> int:
        return int(value(self.words, "--port"))


def value(words: tuple[str, ...], flag: str) -> str:
    (found,) = [word for word in words if word.startswith(f"{flag}=")]
    return found.partition("=")[2]


def render(text: str) -> str:
    """Set `${NAME}`, `${NAME:-default}` and `${NAME:?why}`, as Compose does."""

    def one(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        found = VARIABLES.get(name, rest if kind == ":-" else None)
        assert found is not None, f"nobody says what {name} is"
        return found

    return re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", one, text)


# Compose.

# Keys that the file uses, with what Compose's schema wants of them.
_TOP = {"name": str, "services": dict}
_SERVICE = {
    "image": str,
    "entrypoint": list,
    "command": list,
    "network_mode": str,
    "shm_size": (str, int),
    "volumes": list,
    "restart": str,
    "stop_grace_period": str,
    "environment": dict,
    "healthcheck": dict,
}
_HEALTHCHECK = {
    "test": list,
    "interval": str,
    "timeout": str,
    "retries": int,
    "start_period": str,
}


def check_keys(found: Mapping[str, Any], allowed: Mapping[str, Any]) -> None:
    for key, content in found.items():
        if not key.startswith("x-"):
            assert key in allowed
            assert isinstance(content, allowed[key]), key


def load_compose() -> dict[str, Any]:
    return yaml.safe_load(render(COMPOSE.read_text()))


def compose_containers() -> dict[str, Container]:
    return {
        role: Container(
            role,
            tuple(service["command"]),
            {name: str(given) for name, given in service["environment"].items()},
            service,
        )
        for role, service in load_compose()["services"].items()
    }


def test_compose_file_has_the_form_that_compose_wants() -> None:
    compose = load_compose()
    check_keys(compose, _TOP)
    assert set(compose["services"]) == set(ROLES)
    for service in compose["services"].values():
        check_keys(service, _SERVICE)
        for key in ("entrypoint", "command", "volumes"):
            assert all(isinstance(each, str) for each in service[key])
        for given in service["environment"].values():
            assert isinstance(given, str | int)
        check_keys(service["healthcheck"], _HEALTHCHECK)
        assert service["healthcheck"]["test"][0] == "CMD"
        durations = [service["stop_grace_period"]] + [
            service["healthcheck"][key]
            for key in ("interval", "timeout", "start_period")
        ]
        assert all(re.fullmatch(r"\d+[smh]", each) for each in durations)


def test_compose_starts_both_again_in_any_order() -> None:
    for role, container in compose_containers().items():
        assert container.spec["restart"] == "unless-stopped"
        assert "depends_on" not in container.spec
        # gloo's ports are not known before.
        assert container.spec["network_mode"] == "host"
        test = container.spec["healthcheck"]["test"][-1]
        assert f"http://127.0.0.1:{container.port}/health" in test, role
    assert len({each.port for each in compose_containers().values()}) == 2


def test_compose_healthcheck_is_a_program() -> None:
    for container in compose_containers().values():
        test = container.spec["healthcheck"]["test"]
        assert test[1:3] == ["python3", "-c"]
        compile(test[3], "healthcheck", "exec")


# Kubernetes.


def load_kubernetes() -> dict[str, dict[str, Any]]:
    """Objects by kind."""
    documents = list(yaml.safe_load_all(render(KUBERNETES.read_text())))
    found = {each["kind"]: each for each in documents}
    assert len(found) == len(documents)
    return found


def templates() -> dict[str, dict[str, Any]]:
    """Pod templates by role."""
    group = load_kubernetes()["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    both = (group["leaderTemplate"], group["workerTemplate"])
    return {each["metadata"]["labels"]["role"]: each for each in both}


def kubernetes_containers() -> dict[str, Container]:
    found = {}
    for role, template in templates().items():
        (container,) = template["spec"]["containers"]
        env = dict(GROUP)
        for each in container["env"]:
            source = each.get("valueFrom", {})
            if key := source.get("secretKeyRef"):
                env[each["name"]] = f"secret {key['name']}/{key['key']}"
            elif field := source.get("fieldRef"):
                assert field == {"fieldPath": "status.podIP"}
                env[each["name"]] = "10.0.0.2"
            else:
                assert isinstance(each["value"], str), each["name"]
                env[each["name"]] = each["value"]
        words = [
            re.sub(r"\$\((\w+)\)", lambda match, env=env: env[match[1]], word)
            for word in container["args"]
        ]
        spec = container | {"volumes": template["spec"]["volumes"]}
        found[role] = Container(role, tuple(words), env, spec)
    return found


def test_kubernetes_group_starts_in_any_order_and_again_as_a_whole() -> None:
    group = load_kubernetes()["LeaderWorkerSet"]
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert group["spec"]["startupPolicy"] == "LeaderCreated"
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    # Attention knows the address of the leader, and of nobody else.
    assert template["leaderTemplate"]["metadata"]["labels"]["role"] == "ffn"
    assert set(templates()) == set(ROLES)
    for each in templates().values():
        # Only this is allowed here, and it is the default.
        assert "restartPolicy" not in each["spec"]
        # A Service may be called so that VLLM_PORT would be its address.
        assert each["spec"]["enableServiceLinks"] is False


def test_kubernetes_ports_and_probes_are_those_of_the_servers() -> None:
    for role, container in kubernetes_containers().items():
        ports = {
            each["name"]: each["containerPort"] for each in container.spec["ports"]
        }
        assert ports["http"] == container.port
        assert value(container.words, "--afd-config.afd_port") == str(
            ports.get("afd", 29700)
        )
        assert ("afd" in ports) == (role == "ffn")
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container.spec[kind]
            assert probe["httpGet"] == {"path": "/health", "port": "http"}
            assert probe["periodSeconds"] > 0


def test_kubernetes_volumes_are_there() -> None:
    for container in kubernetes_containers().values():
        volumes = {each["name"] for each in container.spec["volumes"]}
        mounts = {each["name"]: each for each in container.spec["volumeMounts"]}
        assert set(mounts) == volumes
        assert mounts["model"]["mountPath"] == container.words[0]


def test_kubernetes_requests_go_to_attention_and_attention_only_to_ffn() -> None:
    objects = load_kubernetes()
    labels = {role: each["metadata"]["labels"] for role, each in templates().items()}
    service = objects["Service"]["spec"]
    assert service["selector"] == labels["attention"]
    (port,) = service["ports"]
    assert port["targetPort"] == "http"
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels["ffn"]
    (rule,) = policy["ingress"]
    # No port is named: gloo's are not known before.
    assert rule == {"from": [{"podSelector": {"matchLabels": labels["attention"]}}]}
    # LeaderWorkerSet makes a headless Service of its own name.
    names = [each["metadata"]["name"] for each in objects.values()]
    assert len(set(names)) == len(names)
    assert GROUP["LWS_LEADER_ADDRESS"].startswith(f"{names[0]}-0.{names[0]}.")


# Both, and the commands of the page.


def plain_containers() -> dict[str, Container]:
    """The `vllm serve` lines of the page."""
    found = {}
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if "serve" not in words:
                continue
            at = words.index("serve")
            env = dict(word.split("=", 1) for word in words[: at - 1])
            (role,) = [
                each for each in ROLES if f"--afd-config.afd_role={each}" in words
            ]
            assert role not in found
            secret = {"VLLM_AFD_SECRET": "exported"}
            found[role] = Container(role, tuple(words[at + 1 :]), env | secret, {})
    return found


MANIFESTS = {
    "plain": plain_containers,
    "compose": compose_containers,
    "kubernetes": kubernetes_containers,
}
each_manifest = pytest.mark.parametrize("manifest", MANIFESTS)


@each_manifest
def test_both_roles_have_the_same_secret_and_an_environment_of_their_own(
    manifest: str,
) -> None:
    containers = MANIFESTS[manifest]()
    assert set(containers) == set(ROLES)
    secrets = {each.env["VLLM_AFD_SECRET"] for each in containers.values()}
    assert len(secrets) == 1
    assert secrets != {""}
    for role, container in containers.items():
        assert container.env["GLOO_SOCKET_IFNAME"] == "lo"
        assert ("TRITON_INTERPRET" in container.env) == (role == "attention")


@pytest.mark.parametrize("path", [COMPOSE, KUBERNETES], ids=lambda path: path.stem)
def test_images_are_variables_and_the_page_explains_each_variable(path: Path) -> None:
    text = path.read_text()
    images = re.findall(r"image: (.+)", text)
    assert images
    assert all(re.match(r"\$\{VLLM_AFD_IMAGE\b[^}]*\}$", image) for image in images)
    for name in set(re.findall(r"\$\{(\w+)", text)):
        assert f"`{name}`" in PAGE.read_text(), name


def serve_lines() -> Iterator[tuple[str, Container]]:
    for manifest, containers in MANIFESTS.items():
        for container in containers().values():
            yield manifest, container


@pytest.fixture(scope="module")
def model() -> Path:
    layout = Layout.default()
    return checkpoint.ensure(layout, checkpoint.DEFAULT, venv_python(layout.venv))


@cache
def configs(model: Path, role: str) -> dict[str, dict[str, Any]]:
    """What vLLM makes of each line for a role, and of one with an unknown key."""
    lines = {
        manifest: [str(model), *container.words[1:]]
        for manifest, container in serve_lines()
        if container.role == role
    }
    lines["unknown key"] = [*lines["plain"], "--afd-config.afd_hosts=10.0.0.2"]
    done = subprocess.run(
        [
            str(venv_python(Layout.default().venv)),
            "-P",
            str(Path(__file__).with_name("serve_configs.py")),
        ],
        input=json.dumps(list(lines.values())),
        env={
            name: given
            for name, given in os.environ.items()
            if not name.startswith(("VLLM_", "TRITON_", "PYTHON"))
        }
        | {"VLLM_AFD_SECRET": "a-secret", "HF_HUB_OFFLINE": "1"}
        | ({"TRITON_INTERPRET": "1"} if role == "attention" else {}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(lines, found, strict=True))


@pytest.mark.built
@each_manifest
def test_vllm_takes_the_flags_and_both_roles_agree(manifest: str, model: Path) -> None:
    found = {role: configs(model, role)[manifest] for role in ROLES}
    for role, config in found.items():
        assert "error" not in config
        assert config["role"] == role
        container = MANIFESTS[manifest]()[role]
        assert config["http_port"] == container.port
        assert config["dbo"] == (role == "attention")
    assert found["attention"]["common"] == found["ffn"]["common"]
    hosts = {role: config["afd_host"] for role, config in found.items()}
    if manifest == "kubernetes":
        assert hosts == {"attention": "afd-0.afd.default", "ffn": "10.0.0.2"}
    else:
        assert hosts["attention"] == hosts["ffn"] == "10.0.0.2"


@pytest.mark.built
@pytest.mark.parametrize("role", ROLES)
def test_vllm_would_not_take_any_flag(role: str, model: Path) -> None:
    assert configs(model, role)["unknown key"] == {"error": "SystemExit: 2"}


@pytest.mark.built
def test_kubernetes_waits_as_long_as_attention_does(model: Path) -> None:
    wanted = configs(model, "attention")["kubernetes"]["connect_timeout_s"]
    for container in kubernetes_containers().values():
        probe = container.spec["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] > wanted
