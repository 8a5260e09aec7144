"""Routes of the control address, beside those of the data address: pause, weights, sleep, what runs.

Invariants:
- a route that would promise what Seer does not do refuses by name;
- query parameters that Seer does not need are left aside, those of another meaning are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from seer import __version__
from seer.common.config import Config
from seer.common.sleep import SleepLevel, SleepTag
from seer.gateway.control import Control, PauseMode
from seer.gateway.errors import HttpError, bad
from seer.gateway.http import Handler, answer, body_of, endpoint
from seer.gateway.request_bodies import (
    ArealUpdateBody,
    LoadAdapterBody,
    UnloadAdapterBody,
    UpdateBody,
    read_body,
)

B = TypeVar("B", bound=msgspec.Struct)

NO_NCCL = "weights by NCCL are not received: send them with Seer's own client, or name a folder"

UNSUPPORTED = {
    "/init_weight_transfer_engine": NO_NCCL,
    "/start_weight_update": NO_NCCL,
    "/finish_weight_update": NO_NCCL,
    "/collective_rpc": NO_NCCL,
}
"""Routes that trainers call and that are refused with 501 and a reason."""


class ControlRoutes:
    """Answers what is asked of the gateway as a whole."""

    def __init__(self, config: Config, control: Control) -> None:
        self._config = config
        self._control = control

    async def handle(self, request: Request) -> Response:
        """Answer a request of one of `HANDLERS`."""
        method = "GET" if request.method == "HEAD" else request.method  # which a GET's route takes, too
        return await HANDLERS[method, request.url.path](self, request)

    async def pause(self, request: Request) -> Response:
        """`/pause?mode=abort|wait|keep`."""
        await self._control.pause(_mode(request))
        return answer({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """`/resume`."""
        await self._control.resume()
        return answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """`/is_paused`."""
        return answer({"is_paused": self._control.paused})

    async def areal_pause(self, request: Request) -> Response:
        """`/areal_pause_generation`: keeps requests under way, as no answer may mix weights."""
        await self._control.pause("keep")
        return answer({"success": True, "message": "Generation paused"})

    async def areal_continue(self, request: Request) -> Response:
        """`/areal_continue_generation`."""
        await self._control.resume()
        return answer({"success": True, "message": "Generation continued"})

    async def update_weights(self, request: Request) -> Response:
        """`/update_weights`, from a folder."""
        body = await self._read(request, UpdateBody)
        if body.weight_dir is None:
            raise bad("weight_dir", None, NO_NCCL)
        version = await self._control.update(body.weight_dir, "weight_dir")
        return answer({"message": "Weights updated", "weight_version": version})

    async def areal_update_weights(self, request: Request) -> Response:
        """`/areal_update_weights`, from a folder."""
        body = await self._read(request, ArealUpdateBody)
        version = await self._control.update(body.model_path, "model_path")
        return answer({"success": True, "message": "Weights updated", "weight_version": version})

    async def load_adapter(self, request: Request) -> Response:
        """`/v1/load_lora_adapter`, from a folder that PEFT wrote."""
        body = await self._read(request, LoadAdapterBody)
        if body.is_3d_lora_weight:
            raise bad("is_3d_lora_weight", True, "adapters of fused experts are not merged")
        await self._control.load_adapter(body.lora_name, body.lora_path, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """`/v1/unload_lora_adapter`: back to the model that engines were started with."""
        body = await self._read(request, UnloadAdapterBody)
        await self._control.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def weight_info(self, request: Request) -> Response:
        """`/weight_info`: the live version."""
        status = await self._control.buffer.fresh_status()
        return answer({"weight_version": str(status.weight_version)})

    async def sleep(self, request: Request) -> Response:
        """`/sleep?level=1|2&mode=`."""
        levels = {str(level): level for level in get_args(SleepLevel)}
        level = request.query_params.get("level", "1")
        if level not in levels:
            raise bad("level", level, "choose 1 or 2; to have requests wait alone, POST /pause?mode=keep")
        await self._control.sleep(_mode(request), levels[level])
        return answer({"status": "sleeping", "level": levels[level]})

    async def wake_up(self, request: Request) -> Response:
        """`/wake_up?tags=`, once for each tag; without any, all wakes."""
        known: dict[str, SleepTag] = {tag: tag for tag in get_args(SleepTag)}
        given = request.query_params.getlist("tags")
        if unknown := [tag for tag in given if tag not in known]:
            raise bad("tags", unknown[0], f"choose {' or '.join(known)}, or none for all")
        await self._control.wake([known[tag] for tag in given])
        awake = not given or set(given) != {"weights"}
        return answer({"status": "awake" if awake else "sleeping", "tags": given or None})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """`/reset_prefix_cache`: engines drop it themselves whenever weights change."""
        return answer({"success": True})

    async def world_size(self, request: Request) -> Response:
        """`/get_world_size`: the number of engines."""
        return answer({"world_size": self._control.buffer.engines()})

    async def server_info(self, request: Request) -> Response:
        """`/server_info`: no weight transfer engine, as vLLM says it; and how requests ended so far."""
        shown = {"model": self._config.shared.model, "weight_transfer_config": None}
        gateway = msgspec.to_builtins(self._config.gateway)
        counters = await self._control.counts()
        seer = {"version": __version__, "gateway": gateway, "counters": counters}
        text = request.query_params.get("config_format", "text") == "text"
        return answer({"vllm_config": str(shown) if text else shown, "vllm_env": {}, "seer": seer})

    async def metrics(self, request: Request) -> Response:
        """`/metrics`: the counters of `/server_info` for Prometheus. Needs the extra `metrics`."""
        try:
            from seer.gateway.metrics import exposition
        except ModuleNotFoundError as error:
            raise HttpError(501, f"/metrics needs the extra 'seer-rollout[metrics]': {error}") from error
        return Response(exposition(await self._control.counts()), media_type="text/plain")

    async def unsupported(self, request: Request) -> Response:
        """Refuse by name."""
        raise HttpError(501, f"{request.url.path}: {UNSUPPORTED[request.url.path]}")

    async def _read(self, request: Request, kind: type[B]) -> B:
        settings = self._config.gateway
        return read_body(kind, await body_of(request, settings.max_body_bytes, settings.client_seconds))


HANDLERS: dict[tuple[str, str], Callable[[ControlRoutes, Request], Awaitable[Response]]] = {
    ("POST", "/pause"): ControlRoutes.pause,
    ("POST", "/resume"): ControlRoutes.resume,
    ("GET", "/is_paused"): ControlRoutes.is_paused,
    ("POST", "/areal_pause_generation"): ControlRoutes.areal_pause,
    ("POST", "/areal_continue_generation"): ControlRoutes.areal_continue,
    ("POST", "/update_weights"): ControlRoutes.update_weights,
    ("POST", "/areal_update_weights"): ControlRoutes.areal_update_weights,
    ("POST", "/v1/load_lora_adapter"): ControlRoutes.load_adapter,
    ("POST", "/v1/unload_lora_adapter"): ControlRoutes.unload_adapter,
    ("GET", "/weight_info"): ControlRoutes.weight_info,
    ("POST", "/sleep"): ControlRoutes.sleep,
    ("POST", "/wake_up"): ControlRoutes.wake_up,
    ("POST", "/reset_prefix_cache"): ControlRoutes.reset_prefix_cache,
    ("GET", "/get_world_size"): ControlRoutes.world_size,
    ("GET", "/server_info"): ControlRoutes.server_info,
    ("GET", "/metrics"): ControlRoutes.metrics,
    **{("POST", path): ControlRoutes.unsupported for path in UNSUPPORTED},
}
"""What answers which method and path."""


def control_routes(handle: Handler, counters: Counter[str]) -> list[Route]:
    """Return the routes of `HANDLERS`, served by `ControlRoutes.handle`, or by what relays requests to it."""
    routes = []
    for (method, path), handler in HANDLERS.items():
        served = endpoint(handle, counters)
        served.__doc__ = handler.__doc__  # `openapi.py` reads it
        routes.append(Route(path, served, methods=[method]))
    return routes


def _mode(request: Request) -> PauseMode:
    modes: dict[str, PauseMode] = {mode: mode for mode in get_args(PauseMode)}
    mode = request.query_params.get("mode", "abort")
    if mode not in modes:
        raise bad("mode", mode, "choose abort, wait or keep")
    return modes[mode]
