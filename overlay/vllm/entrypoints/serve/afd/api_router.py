# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a server with the AFD FFN role answers to a request for inference."""

from http import HTTPStatus

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.exception_handling.error_response import (
    create_error_response,
)

MESSAGE = (
    "This server has the AFD role 'ffn': it runs the experts for the server with the "
    "role 'attention' and takes no requests. Send them to that server."
)

_PATHS = (
    "/v1/completions",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v2/embed",
    "/v2/rerank",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/inference/v1/generate",
    "/classify",
    "/detokenize",
    "/generative_scoring",
    "/invocations",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
)

router = APIRouter()


async def refuse() -> JSONResponse:
    error = create_error_response(
        MESSAGE, err_type="NotImplementedError", status_code=HTTPStatus.NOT_IMPLEMENTED
    )
    return JSONResponse(error.model_dump(), status_code=error.error.code)


for _path in _PATHS:
    router.post(
        _path, responses={HTTPStatus.NOT_IMPLEMENTED.value: {"model": ErrorResponse}}
    )(refuse)


def attach_router(app: FastAPI) -> None:
    app.include_router(router)
