# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A server with the AFD FFN role says that it takes no requests, and who does."""

from argparse import Namespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.tasks import SupportedTask


def _client(afd_config: dict | None, *supported_tasks: SupportedTask) -> TestClient:
    app = FastAPI()
    app.state.args = Namespace(afd_config=afd_config)
    register_api_routers(app.state.args, app, supported_tasks)
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
