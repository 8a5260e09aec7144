"""In veRL's environment: what its own code makes of images, and what engines would get; prints JSON.

`image_inputs.py MODEL IMAGE...`: prompts by veRL's builder of tokens, and its trainer's inputs by its agent
loop worker's method, on a processor whose images are processed once.
"""

import json
import sys
from types import SimpleNamespace

import torch
from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from seer.integrations.verl.config import Limits
from seer.integrations.verl.images import Images
from seer.integrations.verl.server import request_of

model, *files = sys.argv[1:]
tokenizer, processor = hf_tokenizer(model), hf_processor(model)
images = Images.of(processor)
shown = [Image.open(file).convert("RGB") for file in files]
builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen2_vl", processor=processor)
parts = [{"type": "text", "text": "a"}, *({"type": "image", "image": each} for each in shown)]
ids = builder.build_initial_tokens([{"role": "user", "content": parts}], images=shown)
request = request_of(ids, {}, Limits(64, 24), {"images": shown}, images)


loop = SimpleNamespace(processor=processor, tokenizer=tokenizer, _get_mm_processor_kwargs=lambda _: {})
output = SimpleNamespace(multi_modal_data={"images": shown}, mm_processor_kwargs=None)
answered = torch.tensor([[*ids, 5, 6, 7]])
inputs = AgentLoopWorker._compute_multi_modal_inputs(loop, output, answered)
found = {
    "tokens": ids,
    "places": [[each.name, each.offset, each.length] for each in request.places],
    "engines": b"".join(each.tensors["pixel_values"].tobytes() for each in request.images).hex(),
    "trainer": inputs["pixel_values"].numpy().tobytes().hex(),
    "grids": [inputs["image_grid_thw"].tolist(), [each.tensors["image_grid_thw"][0].tolist() for each in request.images]],
    "bias": request.sampling.logit_bias,
}  # fmt: skip
print(json.dumps(found))
