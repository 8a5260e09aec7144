"""A tiny vision-language model with a chat template, and images as chats have them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import vision_models

CHAT = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %} <bos>{% endif %}"
    "{% if m.content is string %} {{ m.content }}"
    "{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %} <|vision_start|> <|image_pad|> <|vision_end|>{% else %} {{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %} <eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %} <bos>{% endif %}"
)


def make(folder: Path, family: str = "qwen2-vl") -> Path:
    """Write a model whose processor has a chat template into a folder."""
    vision_models.make(family, folder)
    processor(family).save_pretrained(folder)
    return folder


def processor(family: str = "qwen2-vl") -> Any:
    found = vision_models.processor_of(family)
    found.chat_template = CHAT
    return found


def data_uri(image: Any, kind: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def part(image: Any) -> dict[str, Any]:
    """A part of a chat over HTTP: an image, or the URL of one."""
    url = image if isinstance(image, str) else data_uri(image)
    return {"type": "image_url", "image_url": {"url": url}}


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
