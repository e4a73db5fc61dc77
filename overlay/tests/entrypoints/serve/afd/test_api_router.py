# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A server with the AFD FFN role says that it takes no requests, and who does."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import AsyncMock, MagicMock

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.datastructures import State

from vllm.config import ProfilerConfig
from vllm.entrypoints.launchers.api_server import app_state
from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.tasks import SupportedTask

# What a server may be told to do that is no request for inference.
ADMINISTRATIVE = {
    "/abort_requests",
    "/collective_rpc",
    "/fault_tolerance/apply",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/is_scaling_elastic_ep",
    "/pause",
    "/ping",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weight_version",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
}


def _app(
    afd_config: dict | None,
    *supported_tasks: SupportedTask,
    model_config: Any = None,
    **kwargs: Any,
) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(afd_config=afd_config, **kwargs)
    register_api_routers(app.state.args, app, supported_tasks, model_config)
    return app


def _client(afd_config: dict | None, *supported_tasks: SupportedTask) -> TestClient:
    app = _app(afd_config, *supported_tasks)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/resp_1/cancel",
        "/v1/messages",
        "/v1/embeddings",
        "/score",
        "/invocations",
        "/tokenize",
        "/pooling",
    ],
)
@pytest.mark.parametrize("body", ['{"model": "m", "prompt": "hi"}', "no JSON"])
def test_inference_is_refused(path: str, body: str) -> None:
    response = _client({"afd_role": "ffn"}).post(path, content=body)
    assert response.status_code == 501
    error = response.json()["error"]
    assert error["code"] == 501
    assert error["type"] == "NotImplementedError"
    assert "AFD role 'ffn'" in error["message"]
    assert "'attention'" in error["message"]


def test_the_rest_is_there() -> None:
    client = _client({"afd_role": "ffn"})
    assert client.get("/version").status_code == 200
    assert client.get("/v1/completions").status_code == 405
    assert client.post("/no/such/path").status_code == 404


def test_others_have_nothing_to_refuse() -> None:
    assert _client(None).post("/v1/completions").status_code == 404
    # The role that takes requests. There is no engine here to run them.
    attention = _client({"afd_role": "attention"}, "generate")
    assert attention.post("/v1/completions", json={}).status_code != 501


def test_every_request_for_inference_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of routes that are not there yet."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    app = _app(
        None,
        *get_args(SupportedTask),
        model_config=SimpleNamespace(get_pooling_task=lambda tasks: "embed"),
        profiler_config=ProfilerConfig(profiler="cuda"),
        enable_fault_tolerance=True,
    )
    paths = {
        route.path for route in app.routes if "POST" in getattr(route, "methods", ())
    }
    assert paths >= ADMINISTRATIVE | {"/v1/completions", "/pooling", "/score"}
    client = _client({"afd_role": "ffn"})
    answers = {path: client.post(path).status_code for path in paths - ADMINISTRATIVE}
    assert {path for path, status in answers.items() if status != 501} == set()


@pytest.mark.parametrize("role", [None, "attention", "ffn"])
@pytest.mark.asyncio
async def test_only_a_server_with_a_tokenizer_warms_chat_up(
    role: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "OnlineDerenderer",
        "OnlineRenderer",
        "ServingTokenization",
        "load_chat_template",
        "process_lora_modules",
        "resolve_default_chat_template_kwargs",
    ):
        monkeypatch.setattr(app_state, name, MagicMock())
    monkeypatch.setattr(app_state, "init_endpoint_plugins_state", AsyncMock())
    models = MagicMock(return_value=MagicMock(init_static_loras=AsyncMock()))
    monkeypatch.setattr(app_state, "OpenAIServingModels", models)
    engine = MagicMock()
    engine.vllm_config.afd_config = role and MagicMock(is_ffn=role == "ffn")
    state = State()
    await app_state.init_app_state(engine, state, MagicMock(tool_call_parser=None), ())
    assert state.online_renderer.warmup.called is (role != "ffn")
