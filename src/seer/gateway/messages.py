"""Messages of chats as templates expect them, and the images that they show. Pure.

Invariants (tests/unit/test_gateway_messages.py):
- images are found in the order in which a template writes their placeholders: by message, then by part;
- a part that is neither text nor an image is refused by its place and type;
- an image is a `data:` URI of base64, decoded whole; nothing is ever fetched.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from seer.common.types import MAX_IMAGES
from seer.gateway.errors import bad

_SHOWN = 48
"""Characters of an URL in an error: enough for scheme, type and host."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The bytes of an image's file, and the part of the request that has these bytes."""

    field: str
    data: bytes


def plain_messages(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageFile]]:
    """Return messages as templates expect them, and their images in order.

    A message's content is one string; that of a message with images is a list of text and images. Arguments
    of tool calls are objects. Raises `HttpError`.
    """
    images: list[ImageFile] = []
    return [_plain(message, f"messages[{i}]", images) for i, message in enumerate(messages)], images


def _plain(message: Mapping[str, Any], where: str, images: list[ImageFile]) -> dict[str, Any]:
    plain = dict(message)
    if not isinstance(plain.get("role"), str):
        raise bad(f"{where}.role", plain.get("role"), "give system, user, assistant or tool")
    if isinstance(plain.get("content"), list):
        before = len(images)
        parts = [_part(part, f"{where}.content[{i}]", images) for i, part in enumerate(plain["content"])]
        shows = len(images) > before
        plain["content"] = parts if shows else "\n".join(part["text"] for part in parts)
    if plain.get("tool_calls"):
        if not isinstance(plain["tool_calls"], list):
            raise bad(f"{where}.tool_calls", plain["tool_calls"], "give a list of objects with a function")
        plain["tool_calls"] = [_as_object(call, where) for call in plain["tool_calls"]]
    return plain


def _part(part: object, where: str, images: list[ImageFile]) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise bad(f"{where}.type", part, "give text or image_url")
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return {"type": "text", "text": text}
    if kind == "image_url":
        if len(images) == MAX_IMAGES:
            raise bad(where, f"image {MAX_IMAGES + 1}", f"give at most {MAX_IMAGES} images")
        images.append(_image(part.get("image_url"), f"{where}.image_url"))
        return {"type": "image"}
    raise bad(f"{where}.type", kind, "give text or image_url: video, audio and embeddings are not supported")


def _image(given: object, where: str) -> ImageFile:
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise bad(f"{where}.url", url, "give a data: URI")
    head, comma, payload = url.partition(",")
    head = head.lower()
    if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
        fix = "give data:image/png;base64,...: the image itself, as nothing is fetched"
        raise bad(f"{where}.url", url[:_SHOWN], fix)
    try:
        return ImageFile(f"{where}.url", base64.b64decode(payload, validate=True))
    except (binascii.Error, ValueError) as error:
        raise bad(f"{where}.url", url[:_SHOWN], f"is not base64: {error}") from error


def _as_object(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise bad(f"{where}.tool_calls", call, "give objects with a function")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = msgspec.json.decode(function["arguments"] or "{}")
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            fix = f"is not JSON: {error}"
            raise bad(f"{where}.tool_calls.function.arguments", function["arguments"], fix) from error
    return call | {"function": function}
