"""Prompts with images on real engines: equal tokens however the work is cut, and no image left out or mistaken."""

import asyncio
import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import vision_models
from draft_plans import draft_always
from engine_cases import Response, clear, engine_of, run

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs the engine extra and torchvision", allow_module_level=True)

from vision_models import IMAGE, pil_image, processor_of

from seer.client import Placed as ClientPlaced
from seer.client import Prompt, RolloutClient, RolloutFailed, SamplingParams, prepared_image
from seer.common import ids
from seer.common.config import DraftsConfig, load
from seer.common.errors import EngineError, InvalidField
from seer.common.types import Placed
from seer.local.pool_plan import import_problem
from seer.local.system import LocalSystem
from seer.services.engine.backend import Chunk, PlacedImage
from seer.services.engine.vllm import self_test
from seer.services.engine.vllm.backend import VllmBackend
from seer.services.engine.vllm.images import Images
from seer.services.engine.vllm.logit_spread import logits_by_ways

LENGTH = 40
SAMPLING = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.2)
DRAFT = 4
FAMILIES = [
    pytest.param(name, marks=() if name == "qwen2-vl" else pytest.mark.breadth)
    for name in vision_models.FAMILIES
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.make(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmBackend]:
    drafts = DraftsConfig(max_draft=DRAFT, cache=str(tmp_path_factory.mktemp("profiles")))
    with engine_of(model, drafts, kv_blocks=60) as engine:
        draft_always(engine, DRAFT)
        yield engine


@pytest.fixture
def backend(engine: VllmBackend) -> Iterator[VllmBackend]:
    yield engine
    clear(engine)
    engine.core._reset_caches()


Given = tuple[list[int], tuple[PlacedImage, ...]]
"""A prompt's tokens, and its images in their places."""


def prompt(family: str, words: str, *pil: object) -> Given:
    """Return a prompt as an engine gets it; an image takes the place of each #."""
    tokens, images, _ = vision_models.prompt(processor_of(family), words, *pil)
    return tokens, tuple(PlacedImage(each.on_wire, each.image) for each in images)


def asked(family: str, *lines: tuple[object, ...]) -> list[Prompt]:
    """Return prompts as a trainer submits them, each of words and images."""
    made = [vision_models.prompt(processor_of(family), *line) for line in lines]
    return [Prompt(str(i), token_ids=tokens, images=images) for i, (tokens, images, _) in enumerate(made)]


def prompts(family: str) -> dict[str, Given]:
    """One image, two of other sizes, none, the first again with other words, and one that tools showed."""
    made = {
        "one": ("a b # c d", pil_image(1)),
        "two": ("# e # f g", pil_image(2, 24, 40), pil_image(3, 8, 16)),
        "none": ("h i j k",),
        "again": ("l m n # o", pil_image(1)),
    }
    return {name: prompt(family, *line) for name, line in made.items()}


def chunk(name: str, index: int, given, output: list[int] = (), new: int = 10_000, group: str = "") -> Chunk:
    tokens, images = given
    return Chunk(
        request_id=f"{name}#{index}", group_id=group, index=index, attempt=0, key=1000 + 7 * index + len(name),
        prompt_len=len(tokens), max_new_tokens=new, sampling=SAMPLING, tokens=[*tokens, *output], images=images,
    )  # fmt: skip


def rolled(backend: VllmBackend, given, new: int = 10_000, *, group: str = "", forget: bool = False):
    """Two responses to each prompt, in chunks of `new` tokens, all side by side; `forget`: caches between them."""
    done = {(name, index): Response() for name in given for index in range(2)}
    while waiting := [key for key, response in done.items() if len(response.tokens) < LENGTH]:
        if forget:
            backend.core._reset_caches()
        pieces = run(backend, [
            chunk(name, index, given[name], done[name, index].tokens, new, group and f"{group}-{name}")
            for name, index in waiting
        ])  # fmt: skip
        for name, index in waiting:
            done[name, index].tokens += pieces[f"{name}#{index}"].tokens
            done[name, index].logprobs += pieces[f"{name}#{index}"].logprobs
    return done


def same(found, expected):
    assert found.keys() == expected.keys()
    for key, response in expected.items():
        assert found[key].tokens == response.tokens, key
        assert found[key].logprobs == pytest.approx(response.logprobs, abs=1e-4), key


def test_tokens_are_equal_however_the_work_is_cut(backend, family):
    given = prompts(family)
    before = backend.stats()
    whole = rolled(backend, given)
    assert backend.stats().encoder_runs - before.encoder_runs == 3, "siblings, and equal images, share"
    same(rolled(backend, given), whole)
    assert backend.stats().encoder_runs - before.encoder_runs <= 6
    for name in given:
        same(
            rolled(backend, {name: given[name]}), {key: each for key, each in whole.items() if key[0] == name}
        )
    same(rolled(backend, given, 7), whole)
    same(rolled(backend, given, 7, forget=True), whole)
    assert len({tuple(each.tokens) for each in whole.values()}) == len(whole)


def test_drafts_change_no_token(backend, family):
    given = prompts(family)
    whole = rolled(backend, given)
    before = backend.stats()
    same(rolled(backend, given, 7, group="g"), whole)
    same(rolled(backend, given, 11, group="g"), whole)
    after = backend.stats()
    assert after.drafted_tokens > before.drafted_tokens
    assert after.accepted_tokens > before.accepted_tokens


def test_preemption_and_siblings_in_another_order_change_no_token(backend, family):
    given = prompts(family)
    whole = rolled(backend, given)
    many = {name: given[name] for name in ("two", "one")}
    found = run(backend, [
        chunk(name, index, many[name], group=f"{index}") for index in range(24) for name in many
    ])  # fmt: skip
    assert sum(response.ends[-1].preemptions for response in found.values()) > 0, "60 blocks are too few"
    for (name, index), response in whole.items():
        if name in many:
            assert found[f"{name}#{index}"].tokens == response.tokens
    backend.core._reset_caches()
    for place in (23, 11):
        for name in many:
            alone = run(backend, [chunk(name, place, many[name])])[f"{name}#{place}"]
            assert alone.tokens == found[f"{name}#{place}"].tokens


def test_one_image_shown_twice_in_a_prompt_is_seen_twice(backend, family):
    shown = {"same": (1, 1), "first": (1, 2), "second": (2, 1)}
    told = {name: prompt(family, "a # b # c", *map(pil_image, seeds)) for name, seeds in shown.items()}
    whole = rolled(backend, told)
    same(rolled(backend, told, 7, forget=True), whole)
    assert len({tuple(whole[name, 0].tokens) for name in told}) == 3, "other images give other tokens"


def test_logits_are_those_of_transformers(backend, family, model):
    import torch
    from transformers import AutoModelForImageTextToText

    reference = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    processor = processor_of(family)
    for words, *pil in (
        ("a b # c d", pil_image(1)),
        ("# e # f g", pil_image(2, 24, 40), pil_image(3, 8, 16)),
    ):
        tokens, images, inputs = vision_models.prompt(processor, words, *pil)
        placed = tuple(PlacedImage(each.on_wire, each.image) for each in images)
        with torch.no_grad():
            expected = reference(**inputs).logits[0, -1].numpy()
        one = msgspec.structs.replace(chunk("p", 0, (tokens, placed)), max_new_tokens=1)
        _, ((logits,),) = backend.probe.capture(one)
        assert logits == pytest.approx(expected, abs=2e-3)


def test_the_teacher_of_verify_sees_images_and_placeholders_that_were_sampled(backend, family, model):
    import torch
    from transformers import AutoModelForImageTextToText

    reference = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    pil = pil_image(2, 24, 40), pil_image(3, 8, 16)
    tokens, shown = prompt(family, "# e # f g", *pil)
    output = run(backend, [chunk("two", 0, (tokens, shown))])["two#0"].tokens[:9]
    ways = logits_by_ways(backend.probe, [*tokens, *output], len(tokens), 1000 + 3, SAMPLING, shown)
    with torch.no_grad():
        inputs = vision_models.prompt(processor_of(family), "# e # f g", *pil).inputs
        inputs = dict(inputs) | {
            "input_ids": torch.tensor([[*tokens, *output]]),
            "attention_mask": torch.ones(1, len(tokens) + len(output), dtype=torch.long),
            "mm_token_type_ids": torch.tensor(
                [[int(token == IMAGE) for token in tokens] + [0] * len(output)]
            ),
        }
        expected = reference(**inputs).logits[0, -1].numpy()
    assert len(ways) == 4, "two prefills and two decodes reach this context"
    for logits in ways:
        assert logits == pytest.approx(expected, abs=2e-3)
    sampled = [*output, IMAGE, 9]
    again = backend.probe.logits([*tokens, *sampled], len(tokens), shown)
    assert np.isfinite(again).all()
    with pytest.raises(InvalidField, match="vLLM would read the others as text"):
        backend.probe.logits([*tokens, *sampled], None, shown)
    text = [5, 6, 7]
    sampled = [*run(backend, [chunk("text", 0, (text, ()))])["text#0"].tokens[:3], IMAGE, 9]
    ways = logits_by_ways(backend.probe, [*text, *sampled], len(text), 1000 + 3, SAMPLING)
    assert len(ways) >= 2
    assert np.isfinite(ways).all()
    with pytest.raises(InvalidField, match="vLLM would read the others as text"):
        backend.probe.logits([*tokens, *sampled], len(tokens))


def test_an_image_that_is_left_out_is_refused(backend, family):
    """vLLM itself would give wrong tokens, without an error."""
    tokens, images = prompts(family)["two"]
    for some in ((), images[:1], images[1:]):
        with pytest.raises(InvalidField, match="vLLM would read the others as text"):
            backend.add(chunk("p", 0, (tokens, some)))
        with pytest.raises(InvalidField, match="vLLM would read the others as text"):
            backend.add(chunk("p", 0, (tokens, some), output=[9, 8, IMAGE]))
    whole = run(backend, [chunk("p", 0, (tokens, images), output=[9, 8, IMAGE])])
    assert len(whole["p#0"].tokens) == LENGTH - 3, "behind the prompt it may be the model's own"


def test_other_pixels_under_a_known_name_are_not_read(backend, family):
    """Whoever reads an image checks it against its name; vLLM knows nothing but the name."""
    tokens, ((place, known),) = prompts(family)["one"]
    expected = run(backend, [chunk("p", 0, (tokens, [PlacedImage(place, known)]))])["p#0"].tokens
    processor = processor_of(family)
    other = vision_models.prompt(processor, "#", pil_image(77)).images[0].image
    from seer.common.prepared_image import read

    with pytest.raises(InvalidField, match="is not the name of these bytes"):
        read(known.name, other.data)
    assert run(backend, [chunk("p", 0, (tokens, [PlacedImage(place, known)]))])["p#0"].tokens == expected


def spoilt(image, **changes):
    return prepared_image("image", **(dict(image.tensors) | changes))


def test_what_vllm_could_not_run_is_refused_by_name(backend, family):
    tokens, ((place, image),) = prompts(family)["one"]
    pixels, grid = image.tensors["pixel_values"], image.tensors["image_grid_thw"]
    bad = pixels.copy()
    bad[3, 5] = np.nan
    cases = {
        "images[0].length": [(Placed(image.name, place.offset, place.length - 1), image)],
        "images[0].offset": [(Placed(image.name, place.offset - 1, place.length), image)],
        "pixel_values": [
            (place, spoilt(image, pixel_values=bad)),
            (place, spoilt(image, pixel_values=pixels[1:])),
        ],
        "image_grid_thw": [(place, spoilt(image, image_grid_thw=grid * 3))],
    }
    for field, wrong in cases.items():
        for where, what in wrong:
            with pytest.raises(InvalidField) as refused:
                backend.add(chunk("p", 0, (tokens, [PlacedImage(where, what)])))
            assert refused.value.field == field
    assert not backend.has_work()
    most, before = backend._images._most, backend._images
    backend._images = Images(before._model, place.length - 1)
    with pytest.raises(InvalidField, match="encoder takes images of at most"):
        backend.add(chunk("p", 0, (tokens, [PlacedImage(place, image)])))
    backend._images = before
    assert backend.capacity.image_tokens == most >= 256 // 4
    with pytest.raises(InvalidField, match="this engine's model has no images"):
        Images(None, 0).features(chunk("p", 0, (tokens, [PlacedImage(place, image)])))


@pytest.fixture(scope="module")
def moved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, but for its vision encoder's weights."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("moved") / "model"
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    changed = {name: each * 1.3 if "visual" in name else each for name, each in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_new_weights_and_sleep_forget_encoded_images(backend, family, model, moved, tmp_path):
    given = prompts(family)
    first = rolled(backend, given)
    backend.load_weights(moved, "other")
    other = rolled(backend, given)
    changed = {key[0] for key in first if first[key].tokens != other[key].tokens}
    assert changed == {"one", "two", "again"}, "the vision encoder's alone were changed"
    backend.load_weights(model, "first")
    same(rolled(backend, given), first)
    from seer.common.sleep import SleepState

    backend.sleep(SleepState.ASLEEP, 1)
    backend.sleep(SleepState.AWAKE, 1)
    same(rolled(backend, given), first)
    with pytest.raises(EngineError, match="adapters of models with images"):
        backend.load_weights(tmp_path, "adapter", base=model)


def test_the_self_test_notices_an_engine_that_shows_no_images(backend, family, monkeypatch):
    from seer.common.image_models import image_model
    from seer.services.engine.vllm import loading

    images = image_model(loading.model_config(backend._shared))
    self_test.check(backend.probe, images)
    monkeypatch.setattr(Images, "features", lambda self, chunk: None)
    with pytest.raises(EngineError, match="two images give the same logits"):
        self_test.check(backend.probe, images)


def direct(backend: VllmBackend, shown: list[Prompt], n: int) -> list[list[int]]:
    """Return what prompts come to in one engine, each response in one go."""
    chunks = [
        Chunk(
            request_id=f"{prompt.id}#{index}", group_id="", index=index, attempt=0, sampling=SAMPLING,
            key=ids.request_key(0, 0, prompt.id, index), prompt_len=len(prompt.token_ids),
            max_new_tokens=LENGTH, tokens=list(prompt.token_ids),
            images=tuple(PlacedImage(each.on_wire, each.image) for each in prompt.images),
        ) for prompt in shown for index in range(n)
    ]  # fmt: skip
    found = run(backend, chunks)
    return [found[each.request_id].tokens for each in chunks]


@pytest.mark.timeout(300)
async def test_kv_behind_an_image_is_read_by_another_engine_and_not_after_an_update(
    backend, family, model, moved
):
    if problem := import_problem():
        pytest.skip(f"Mooncake cannot be imported ({problem})")
    first, second = pil_image(4, 32, 32), pil_image(5, 32, 32)
    shown = asked(family, ("a # # b", first, second), ("# c", second), ("e f g",))
    expected = direct(backend, shown, 4)
    backend.load_weights(moved, "moved")
    other = direct(backend, shown, 4)
    backend.load_weights(model, "first")
    assert all(
        (old != new) == (place < 8) for place, (old, new) in enumerate(zip(expected, other, strict=True))
    )
    settings = [
        f"shared.model={model}", "pool.kind=mooncake", "pool.pull_tokens=0", "pool.dram_gib=0.1",
        "engine.max_model_len=256", "engine.kv_blocks=40", "drafts.source=off", "buffer.chunk_size=16",
        "buffer.policy=migrate",
    ]  # fmt: skip
    async with LocalSystem(load(None, {}, settings), 2) as system, RolloutClient(system.endpoint) as client:

        async def rolls() -> list[list[int]]:
            rollout = await client.submit(shown, n=4, sampling=SAMPLING, rollout_number=0, repeat=True)
            groups = await rollout.result()
            return [response.token_ids.tolist() for group in groups for response in group.responses]

        async def pulled() -> int:
            await asyncio.sleep(1.5)  # engines report once a second
            return sum(each.stats.pool_tokens for each in (await client.status()).instances)

        async def forget() -> None:
            await client.sleep()
            await client.wake()

        assert await rolls() == expected
        await forget()  # from now on only the pool has KV
        assert await rolls() == expected
        before = await pulled()
        assert before > 0
        await client.update_weights(1, moved)
        assert await rolls() == other, "KV behind these images is of other weights"
        await forget()
        assert await rolls() == other
        assert await pulled() > before


@pytest.mark.breadth
@pytest.mark.timeout(300)
async def test_a_whole_system_gives_the_same_tokens_and_moves_each_image_once(family, model):
    lines = ("a # b", pil_image(1)), ("# c # d", pil_image(2, 24, 40), pil_image(1)), ("e f g",)
    shown = asked(family, *lines)
    found = []
    for engines, chunk_size, source in ((1, 400, "off"), (2, 16, "grouped")):
        settings = [
            f"shared.model={model}",
            "pool.kind=none",
            "engine.max_model_len=256",
            "engine.kv_blocks=60",
        ]
        settings += [f"buffer.chunk_size={chunk_size}", "buffer.policy=migrate", f"drafts.source={source}"]
        async with (
            LocalSystem(load(None, {}, settings), engines) as system,
            RolloutClient(system.endpoint) as client,
        ):
            rollout = await client.submit(shown, n=4, sampling=SAMPLING, rollout_number=0)
            groups = await rollout.result()
            found.append([response.token_ids.tolist() for group in groups for response in group.responses])
            async with asyncio.timeout(10):
                while not all(
                    runs := [each.stats.encoder_runs for each in (await client.status()).instances]
                ):
                    await asyncio.sleep(0.1)  # engines report once a second
            assert max(runs) <= 3 * 4
            sizes = {each.image.name: each.image.size for prompt in shown for each in prompt.images}
            counters = (await client.status()).counters
            assert counters["image_received_bytes"] == sum(sizes.values())
            assert counters["image_sent_bytes"] == engines * sum(sizes.values())
            forged = replace(shown[0].images[0].image, tensors={})
            wrong = [Prompt("w", token_ids=[7, IMAGE, 8], images=[ClientPlaced(forged, 1, 1)])]
            with pytest.raises(RolloutFailed, match="this image takes 6 tokens"):
                await (await client.submit(wrong, n=1, sampling=SAMPLING)).result()
    assert found[0] == found[1]
