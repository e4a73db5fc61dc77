# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm.config import VllmConfig
from vllm.entrypoints.serve.dev.server_info import api_router

pytestmark = pytest.mark.skip_global_cleanup


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "VLLM_AFD_SECRET"])
def test_server_info_shows_no_secret(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "open sesame")
    monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.1")
    monkeypatch.setattr(api_router, "_get_system_env_info_cached", dict)
    app = FastAPI()
    api_router.attach_router(app)
    app.state.vllm_config = VllmConfig()
    response = TestClient(app).get("/server_info", params={"config_format": "json"})
    assert response.status_code == 200
    assert response.json()["vllm_env"]["VLLM_HOST_IP"] == "192.0.2.1"
    assert "open sesame" not in response.text
    assert name not in response.json()["vllm_env"]
