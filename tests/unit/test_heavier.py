"""A heavier model (`examples/countdown/heavier.py`): the same function, more bytes, more KV."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip("needs the engine extra", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "examples" / "countdown"))

import torch
from heavier import MODEL, WEIGHTS, heavier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize(
    ("weight", "kv", "layers", "fill"),
    [(1, 1, 1, "zeros"), (5, 1, 1, "zeros"), (1, 3, 1, "zeros"), (5, 1, 3, "zeros"), (5, 2, 3, "random")],
)
def test_the_same_function_with_more_bytes_kv_and_layers(
    tmp_path: Path, weight: float, kv: int, layers: int, fill: str
) -> None:
    made = heavier(tmp_path / "model", weight=weight, kv=kv, layers=layers, fill=fill)
    if fill == "random":
        assert (load_file(made / WEIGHTS)["model.layers.7.mlp.up_proj.weight"] != 0).all()
    ids = torch.randint(0, 66, (2, 60), generator=torch.Generator().manual_seed(weight * 10 + kv))
    with torch.no_grad():
        logits, expected = (
            AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits for folder in (made, MODEL)
        )
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    config, shipped = (json.loads((folder / "config.json").read_text()) for folder in (made, MODEL))
    assert config["num_key_value_heads"] == kv * shipped["num_key_value_heads"]
    assert config["num_hidden_layers"] == layers * shipped["num_hidden_layers"]
    size, least = ((folder / WEIGHTS).stat().st_size for folder in (made, MODEL))
    assert weight * least * 0.99 < size < (weight + kv) * least * 1.1
    assert (made / "tokenizer.json").is_file()


def test_a_factor_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give 1 or more"):
        heavier(tmp_path / "model", weight=0.5)
    with pytest.raises(ValueError, match="layers = 0: give 1 or more"):
        heavier(tmp_path / "model", layers=0)
    assert not (tmp_path / "model").exists()
