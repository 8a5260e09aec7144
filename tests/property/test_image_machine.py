"""Any order of images that come, groups that need them, and time: what is in use stays, and all is bounded."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from seer.services.buffer.images.image_machine import STALL, ImageMachine

ROOM = 100
SIZES = {letter * 64: size for letter, size in zip("abcdef", (10, 20, 30, 40, 50, 100), strict=True)}
NAMES = st.sampled_from(sorted(SIZES))
TRAINERS = ("t", "u")


class ImagesModel(RuleBasedStateMachine):
    """`groups`: by id, the names that each refers to; `since`: when its wait began, or went on."""

    def __init__(self):
        super().__init__()
        self.machine = ImageMachine(ROOM)
        self.now = 0.0
        self.count = 0
        self.groups: dict[str, tuple[str, list[str]]] = {}
        self.since: dict[str, float] = {}
        self.have: dict[str, int] = {}
        self.checked: set[str] = set()
        self.order: list[str] = []  # the least recently used first

    @property
    def used(self):
        return {name for _, names in self.groups.values() for name in names}

    @property
    def waiting(self):
        return [group for group, (_, names) in self.groups.items() if set(names) - self.checked]

    def forget(self, names):
        for name in names:
            assert name not in self.used, "it is in use"
            del self.have[name]
            self.checked.discard(name)
            self.order.remove(name)

    @rule(names=st.lists(NAMES, max_size=3), trainer=st.sampled_from(TRAINERS))
    def refer(self, names, trainer):
        self.count += 1
        assert self.machine.missing(names) == [n for n in dict.fromkeys(names) if n not in self.checked]
        self.machine.refer(f"g{self.count}", trainer, trainer, names, self.now)
        self.groups[f"g{self.count}"] = trainer, names
        self.since[f"g{self.count}"] = self.now

    @rule(data=st.data())
    def release(self, data):
        group = data.draw(st.sampled_from([*self.groups, "unknown"]))
        self.machine.release(group)
        self.groups.pop(group, None)

    @rule(name=NAMES)
    def begin(self, name):
        if self.machine.get(name) is not None:
            return
        unused = [other for other in self.order if other not in self.used]
        held = sum(SIZES[other] for other in self.have)
        full = []
        for trainer in TRAINERS:
            named = {name for owner, names in self.groups.values() if owner == trainer for name in names}
            theirs = sum(SIZES[other] for other in self.have if other in named)
            if name in named:
                full.append(theirs > 0 and theirs + SIZES[name] > 3 * ROOM // 4)
        if full and all(full):
            with pytest.raises(ValueError, match=r"buffer\.image_bytes"):
                self.machine.begin(name, SIZES[name], self.now)
            return
        if held - sum(SIZES[other] for other in unused) + SIZES[name] > ROOM:
            with pytest.raises(ValueError, match=r"buffer\.image_bytes"):
                self.machine.begin(name, SIZES[name], self.now)
            return
        dropped = self.machine.begin(name, SIZES[name], self.now)
        assert dropped == unused[: len(dropped)], "the least recently used go first"
        before = sum(SIZES[other] for other in dropped[-1:])
        self.forget(dropped)
        left = sum(SIZES[other] for other in self.have)
        assert not dropped or left + before + SIZES[name] > ROOM, "no more than needed"
        self.have[name] = 0
        self.order.append(name)

    @rule(name=NAMES, trainer=st.sampled_from(TRAINERS), whole=st.booleans())
    def grow(self, name, trainer, whole):
        if self.have.get(name, SIZES[name]) == SIZES[name]:
            return
        kept = self.machine.use(name, self.now)
        kept.have = self.have[name] = SIZES[name] if whole else min(SIZES[name] - 1, self.have[name] + 5)
        kept.checked = kept.have == kept.size
        self.checked |= {name} if kept.checked else set()
        self.machine.heard(trainer, self.now)
        self.order.remove(name)
        self.order.append(name)
        for group, (owner, _) in self.groups.items():
            if owner == trainer:
                self.since[group] = self.now

    @rule(name=NAMES)
    def use(self, name):
        if name in self.have:
            assert self.machine.use(name, self.now) is self.machine.get(name)
            self.order.remove(name)
            self.order.append(name)

    @rule(seconds=st.sampled_from((0.5, STALL / 2, STALL, STALL + 1)))
    def wait(self, seconds):
        self.now += seconds
        overdue = [group for group in self.waiting if self.now - self.since[group] > STALL]
        assert self.machine.stalled(self.now) == overdue
        for group in overdue:
            self.machine.release(group)
            del self.groups[group]
        abandoned = self.machine.abandoned(self.now)
        assert all(self.have[name] < SIZES[name] for name in abandoned)
        for name in abandoned:
            self.machine.drop(name)
        self.forget(abandoned)

    @invariant()
    def all_is_bounded_and_known(self):
        assert self.machine.bytes == sum(SIZES[name] for name in self.have) <= ROOM
        for name in SIZES:
            kept = self.machine.get(name)
            assert (kept is not None) == (name in self.have)
            assert kept is None or (kept.have, kept.checked) == (self.have[name], name in self.checked)
        assert self.machine.missing(SIZES) == [name for name in SIZES if name not in self.checked]


def test_any_order_of_events():
    run_state_machine_as_test(ImagesModel, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.parametrize("name", ["", "a" * 63, "a" * 65, "A" * 64, "../" + "a" * 61, "a" * 63 + "\n"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        ImageMachine(ROOM).begin(name, 5, 0.0)


def test_files_of_an_earlier_incarnation_count_once_they_were_checked():
    machine = ImageMachine(ROOM)
    sizes = {name: SIZES[name] for name in sorted(SIZES)[:5]}
    assert machine.found(sizes, 0.0) == ["a" * 64, "b" * 64, "c" * 64], "150 bytes, and room for 100"
    assert machine.bytes == 90
    assert machine.missing(sizes) == list(sizes)


def test_what_two_groups_show_is_in_use_until_both_are_gone():
    machine = ImageMachine(ROOM)
    one, other = "e" * 64, "f" * 64
    machine.begin(one, SIZES[one], 0.0)
    machine.refer("g", "t", "t", [one], 0.0)
    machine.refer("h", "t", "t", [one, one], 0.0)
    for group in ("h", "g"):
        with pytest.raises(ValueError, match="images in use have 50"):
            machine.begin(other, SIZES[other], 0.0)
        machine.release(group)
    assert machine.begin(other, SIZES[other], 0.0) == [one]


def test_a_group_waits_as_long_as_anything_of_its_trainer_comes():
    machine = ImageMachine(ROOM)
    machine.refer("last", "t", "t", ["a" * 64], 0.0)
    machine.refer("other", "u", "u", ["b" * 64], 0.0)
    for second in range(0, 100, 20):
        machine.heard("t", float(second))
        assert "last" not in machine.stalled(float(second))
    assert machine.stalled(80.0 + STALL) == []
    assert machine.stalled(80.5 + STALL) == ["last"]
    assert machine.stalled(999.0) == [], "each group is reported once"


def test_one_trainers_images_leave_room_for_anothers():
    machine = ImageMachine(ROOM)
    mine, more, others = "e" * 64, "d" * 64, "b" * 64
    machine.refer("g", "t-0", "t", [mine, more], 0.0)
    machine.refer("h", "u", "u", [others], 0.0)
    machine.begin(mine, SIZES[mine], 0.0)
    with pytest.raises(
        ValueError, match=r"images in use of trainer 't' have 50 and may have 75: .*image_bytes"
    ):
        machine.begin(more, SIZES[more], 0.0)
    assert machine.begin(others, SIZES[others], 0.0) == []
    machine.refer("i", "v", "v", [more], 0.0)
    with pytest.raises(ValueError, match="images in use have 70 and may have 100"):
        machine.begin(more, SIZES[more], 0.0)
    machine.release("h")
    assert machine.begin(more, SIZES[more], 0.0) == [others], "another that needs it may have it"
    machine.release("i")
    machine.release("g")
    assert machine.begin("f" * 64, 100, 0.0) == [mine, more], "whoever has none may have it all"
