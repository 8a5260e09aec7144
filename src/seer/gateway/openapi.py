"""`/openapi.json`: the routes that an address really has, with the bodies that these read. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from seer import __version__
from seer.gateway import request_bodies as bodies
from seer.gateway.answers import Json
from seer.gateway.http import answer
from seer.gateway.responses_body import ResponsesBody

BODIES: dict[str, type[msgspec.Struct]] = {
    "/inference/v1/generate": bodies.GenerateBody,
    "/skyrl/v1/generate": bodies.GenerateBody,
    "/v1/completions": bodies.CompletionBody,
    "/v1/chat/completions": bodies.ChatBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": bodies.TokenizeBody,
    "/detokenize": bodies.DetokenizeBody,
    "/update_weights": bodies.UpdateBody,
    "/areal_update_weights": bodies.ArealUpdateBody,
    "/v1/load_lora_adapter": bodies.LoadAdapterBody,
    "/v1/unload_lora_adapter": bodies.UnloadAdapterBody,
}
"""What routes read; the others have no body."""


def openapi(routes: Sequence[Route]) -> Json:
    """Return the document of these routes."""
    _, schemas = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    paths: Json = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(route.path, {})[method.lower()] = _operation(route)
    head = {"openapi": "3.1.0", "info": {"title": "Seer's gateway", "version": __version__}}
    return {**head, "paths": paths, "components": {"schemas": schemas}}


def _operation(route: Route) -> Json:
    told = (route.endpoint.__doc__ or "").partition("\n")[0].rpartition("`: ")[2]
    operation: Json = {"summary": told, "responses": {"200": {"description": "the answer"}}}
    if (kind := BODIES.get(route.path)) is not None:
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def with_openapi(routes: Sequence[Route]) -> list[Route]:
    """Return the routes and one more, which tells of all of them."""

    async def told(request: Request) -> Response:
        """`/openapi.json`: this document."""
        return answer(document)

    all_routes = [*routes, Route("/openapi.json", told, methods=["GET"])]
    document = openapi(all_routes)
    return all_routes
