"""What a virtual run does, drawn from its seed alone: a system, what its trainers do, and its faults."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from chaos.conversations import COPIES, IMAGES, Way, every
from seer.common.sleep import SleepLevel

PROCESSES = ("buffer", "context", "dgds", "engine", "trainer")
WHOLE_FAULTS = ("kill", "stop", "reset", "part")
KINDS = (
    *(f"{what} {process}" for what in WHOLE_FAULTS for process in PROCESSES),
    *(
        f"{what} {other}-{way}"
        for what in ("cut", "hole")
        for other in ("trainer", "engine")
        for way in ("buffer",)
    ),
    "cut context-buffer",
    "cut engine-dgds",
    "drain buffer",
    "drain engine",
    "join engine",
    "lose trainer",
    "fill disk",
    "spoil images",
    "spoil memory",
    "twin engine",
)
"""`stop` is SIGSTOP and later SIGCONT; `reset` breaks connections, `part` cuts a process off, `cut` one
road and `hole` one way of it; `lose` kills for good; `spoil` damages what the buffer has of
images, or the dgds of past groups; `twin` starts an engine under a name that another one has."""

CAUGHT = ("reset", "reset", "cut", "kill source", "kill target")
"""What befalls a connection as a certain message is under way."""

NOISE = ("noise engine", "noise trainer", "noise buffer")
"""Messages dropped, doubled, delayed and overtaken, which TCP never does: drawn on demand only."""

_WEIGHTS = {"kill": 3, "stop": 2, "drain": 2, "lose": 2, "part": 2, "fill": 2}
_DRAWN: tuple[str, ...] = tuple(
    kind
    for kind in KINDS
    for _ in range(_WEIGHTS.get(kind.split()[0], 1))
    if kind.split()[0] not in ("spoil", "twin")
)

LONG_SECONDS = (5.0, 15.0, 45.0, 90.0)
"""Stops that are more than hiccups."""

POISON = 998
"""A prompt of this token ends every engine that runs it."""

UNSAMPLEABLE = 996
"""After a prompt of this token there is no next one: its logits are not numbers."""

ODD = {"poison", "mute"}
"""Ids of prompts of these tokens."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`seconds` until it is over: the pause before a restart, the length of anything else."""

    at: float
    kind: str
    target: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Catch:
    """What befalls a connection as the `nth` message of a way is under way on it, before it arrives.

    `way` is an endpoint's name, whether towards its owner, and a tag. `what`: `reset`, `cut` for `seconds`,
    or `kill source` or `kill target`, who is back `seconds` later.
    """

    way: tuple[str, bool, str]
    nth: int
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class InParts:
    """How a rollout is asked for over an open one: by `size` responses, the last of each group `late` seconds
    after the others, under names that begin with `prefix`. `feint`: each part's id is used first for something
    else, which is cancelled that many seconds later.
    """

    size: int
    late: float
    feint: float | None
    stream: bool
    prefix: str


@dataclass(frozen=True, slots=True)
class InTurns:
    """How a rollout has trajectories of many turns, with `waits` seconds after each for an environment.

    `resent`: by loops that send whole contexts, rewrite their history after each turn of these numbers, and
    send some prompts twice at once; else by agents with a journal, at most `most_open` at a time.
    """

    waits: tuple[float, ...]
    idle_seconds: float
    room: int
    most_open: int
    resent: bool
    rewritten: tuple[int, ...]

    @property
    def turns(self) -> int:
        """How many each trajectory has."""
        return len(self.waits) + 1


@dataclass(frozen=True, slots=True)
class Roll:
    """A rollout of `prompts` (id -> length), submitted and waited for; `parts`, `turns`: over an open one.

    `pinned`: asks for the version its trainer knows live, `ahead` versions later; else for any. It ends by
    `deadline` or `cancel` seconds after it began, if given. `aside`: what follows does not wait for it.
    `images`: how many each prompt shows, and whether its tools show some.
    """

    rollout_id: str
    number: int
    seed: int
    prompts: tuple[tuple[str, int], ...]
    n: int
    max_tokens: int
    pinned: bool = False
    ahead: int = 0
    deadline: float | None = None
    cancel: float | None = None
    aside: bool = False
    shared: bool = False
    parts: InParts | None = None
    turns: InTurns | None = None
    images: int = 0

    @property
    def most_tokens(self) -> int:
        """The most that its responses can have together."""
        return self.n * len(self.prompts) * self.max_tokens * (self.turns.turns if self.turns else 1)


@dataclass(frozen=True, slots=True)
class Renew:
    """An update to the next version; `folder`: from one that all see, else streamed.

    `in_place`: if the weights before it are neither the first ones nor in place themselves, so that no version
    is lost when it fails.
    """

    folder: bool
    in_flight: str
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """Sleep, and wake after a while: at level 2, once there are weights of an update, the weights first.

    `renews`: wake the weights first, update, and wake the rest then.
    """

    seconds: float
    renews: bool = False

    @property
    def level(self) -> SleepLevel:
        """Long sleep is deep."""
        return 2 if self.seconds >= 1 else 1


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing, as a trainer that trains."""

    seconds: float


Step = Roll | Renew | Rest | Pause


@dataclass(frozen=True, slots=True)
class Plan:
    """Times are virtual seconds. The first trainer alone updates weights and has engines sleep.

    Engines are on `nodes` machines, in turn, and none of these is the buffer's; weights go from one to
    `fan_out` others. Buffer and engines keep `image_bytes` of images; 0: all.
    """

    seed: int
    engines: int
    scripts: tuple[tuple[Step, ...], ...]
    mean_tokens: int
    chunk_size: int
    policy: str
    kv_blocks: int
    step_seconds: float
    silence_seconds: float
    update_seconds: float
    ttl_seconds: float
    result_bytes: int
    max_requests: int
    engine_delay: float
    load_seconds: float
    latency: float
    jitter: float
    queue: int
    clocks: bool
    same_machine: bool
    spool: bool
    rejections: int
    poison: bool
    header_bytes: int
    rogue: bool
    faults: tuple[Fault, ...] = field(default=())
    catches: tuple[Catch, ...] = field(default=())
    lease_seconds: float = 3600.0
    nodes: int = 1
    fan_out: int = 1
    image_bytes: int = 0
    memory: bool = False
    """The dgds has a file of past groups."""
    odd_weights: bool = False

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers' names."""
        return tuple(f"t{number}" for number in range(len(self.scripts)))

    @property
    def updates(self) -> bool:
        """Whether weights change."""
        return any(
            isinstance(step, Renew) or (isinstance(step, Rest) and step.renews) for step in self.scripts[0]
        )

    @property
    def requests(self) -> int:
        """Requests of all rollouts, and turns that an earlier incarnation may have left under way."""
        return sum(step.n * len(step.prompts) * (1 if step.turns is None else 3) for step in self.rolls)

    @property
    def turn_seconds(self) -> float:
        """How long trajectories of all rollouts may be away, one rollout after the other."""
        return sum(
            step.turns.idle_seconds + sum(step.turns.waits) * math.ceil(len(step.prompts) * step.n / min(step.turns.most_open, self.max_requests // 4))
            for step in self.rolls
            if step.turns is not None
        )  # fmt: skip

    @property
    def rolls(self) -> tuple[Roll, ...]:
        """All rollouts of all trainers."""
        return tuple(step for script in self.scripts for step in script if isinstance(step, Roll))


def draw(seed: int, *, noise: bool = False) -> Plan:
    """Return the plan of a seed; `noise` mixes that into the faults."""
    rand = random.Random(f"plan {seed}")
    engines = rand.choice((1, 2, 2, 3))
    trainers = rand.choice((1, 1, 2, 2, 3))
    long = rand.random() < 0.2
    plan = Plan(
        seed=seed,
        engines=engines,
        scripts=_in_place(_scripts(rand, trainers), random.Random(f"in place {seed}")),
        mean_tokens=rand.choice((4, 12, 24)),
        chunk_size=rand.choice((1, 4, 8, 16, 100)),
        policy=rand.choice(("seer", "seer", "seer-paper", "divided", "least-loaded", "migrate", "static")),
        kv_blocks=rand.choice((3, 4, 6, 100)),
        step_seconds=rand.choice((0.05, 0.1)),
        silence_seconds=rand.choice((6.0, 20.0, 20.0)),
        update_seconds=rand.choice((40.0, 3600.0, 3600.0)),
        ttl_seconds=rand.choice((1.0, 4.0, 60.0, 3600.0)),
        result_bytes=rand.choice((400, 4000, 2**28, 2**28)),
        max_requests=rand.choice((8, 20, 200_000, 200_000)),
        engine_delay=rand.choice((0.0, 0.0, 2.0)),
        load_seconds=rand.choice((0.0, 0.5, 3.0)),
        latency=rand.choice((0.0, 0.0, 0.001, 0.04, 0.3)),
        jitter=rand.choice((0.0, 0.0, 0.01, 0.3)),
        queue=rand.choice((16, 1000, 1000)),
        clocks=rand.random() < 0.35,
        same_machine=rand.random() < 0.5,
        spool=rand.random() < 0.3,
        rejections=rand.choice((0, 0, 1)),
        poison=rand.random() < 0.06,
        rogue=rand.random() < 0.1,
        header_bytes=rand.choice((2**11, 2**24, 2**24, 2**24)),
    )
    count, burst = rand.randint(1, 5), rand.choice((3.0, 3.0, 10.0))
    kinds = _DRAWN + NOISE * 5 if noise else _DRAWN
    faults = [_fault(rand, plan, kinds, burst, long and each == 0) for each in range(count)]
    if plan.poison:
        plan = replace(plan, scripts=_with_odd(plan.scripts, "poison"))
    elif random.Random(f"mute {seed}").random() < 0.1:
        plan = replace(plan, scripts=_with_odd(plan.scripts, "mute"))
    plan = replace(plan, scripts=_in_parts(random.Random(f"parts {seed}"), plan.scripts))
    plan = replace(plan, scripts=_in_turns(random.Random(f"turns {seed}"), plan.scripts))
    lease = random.Random(f"lease {seed}").choice((3600.0, 3600.0, 3600.0, 12.0, 30.0))
    catches = _catches(random.Random(f"catches {seed}"))
    nodes = random.Random(f"nodes {seed}")
    plan, spoilt, caught = _with_images(random.Random(f"images {seed}"), plan)
    return replace(
        plan,
        faults=tuple(sorted((*faults, *spoilt), key=lambda fault: fault.at)),
        catches=(*catches, *_catches_among(nodes, lambda way: way[0] == COPIES), *caught),
        lease_seconds=lease,
        nodes=nodes.choice((1, 3, 3)),
        fan_out=nodes.choice((1, 1, 2)),
    )


def _fault(rand: random.Random, plan: Plan, kinds: tuple[str, ...], burst: float, long: bool) -> Fault:
    kind = (
        rand.choice(("stop buffer", "stop engine", "stop trainer", "part engine"))
        if long
        else rand.choice(kinds)
    )
    what, target = kind.split()
    names = {"engine": f"e{rand.randrange(plan.engines)}", "trainer": f"t{rand.randrange(len(plan.scripts))}"}
    if what == "lose":  # the first one goes on, or nobody would mend what deaths of engines break
        names["trainer"] = f"t{len(plan.scripts) - 1}"
        if len(plan.scripts) == 1:
            what, kind, target = "kill", "kill trainer", "trainer"
    target = "-".join(names.get(part, part) for part in target.split("-"))
    seconds = rand.uniform(0.01, 2.0)
    if long:
        seconds = rand.choice(LONG_SECONDS)
    elif what in ("part", "cut", "hole") and rand.random() < 0.4:
        seconds = rand.uniform(4.0, 24.0)  # past what TCP bears, silence and repeated Hellos
    elif what in ("noise", "fill"):
        seconds = rand.uniform(0.5, 6.0)
    return Fault(rand.uniform(0.0, burst), kind, target, seconds)


def _catches(rand: random.Random) -> tuple[Catch, ...]:
    """Draw from all types of message alike: the rare ones decide as much as those that come by thousands."""
    ways = sorted(way for way in every() if way[0] != COPIES and way[2] not in IMAGES)
    return tuple(
        Catch(rand.choice(ways), rand.choice((1, 1, 2, 5)), rand.choice(CAUGHT), _caught_seconds(rand))
        for _ in range(rand.choice((0, 2, 6)))
    )


def _catches_among(rand: random.Random, drawn: Callable[[Way], bool]) -> tuple[Catch, ...]:
    """Draw what befalls seldom conversations: engines that copy weights from each other, and images."""
    ways = sorted(way for way in every() if drawn(way))
    return tuple(
        Catch(rand.choice(ways), rand.choice((1, 1, 2, 5)), rand.choice(CAUGHT), _caught_seconds(rand))
        for _ in range(rand.choice((0, 2)))
    )


def _caught_seconds(rand: random.Random) -> float:
    return rand.uniform(0.01, 2.0) if rand.random() < 0.7 else rand.uniform(4.0, 24.0)


# --- what trainers do ----------------------------------------------------------------------------


def _scripts(rand: random.Random, trainers: int) -> tuple[tuple[Step, ...], ...]:
    share = rand.random() < 0.4
    first = _script(rand, 0, renews=rand.random() < 0.55, rests=rand.random() < 0.15)
    others = [_script(rand, number, renews=False, rests=False) for number in range(1, trainers)]
    if share and others:
        rolls = [step for step in first if isinstance(step, Roll) and step.cancel is None]
        if rolls:
            copied = replace(rand.choice(rolls), shared=True, aside=False, pinned=rand.random() < 0.5)
            if rand.random() < 0.3:
                copied = replace(copied, seed=copied.seed + 1)
            others[0] = (Pause(rand.choice((0.0, 0.1, 1.0))), copied, *others[0])
            first = tuple(
                replace(step, shared=True) if isinstance(step, Roll) and step.rollout_id == copied.rollout_id
                else step for step in first
            )  # fmt: skip
    return (first, *others)


def _in_place(scripts: tuple[tuple[Step, ...], ...], rand: random.Random) -> tuple[tuple[Step, ...], ...]:
    """Have some updates be in place; drawn apart, so that seeds stay what they were otherwise."""
    return tuple(
        tuple(
            replace(step, in_place=rand.random() < 0.4) if isinstance(step, Renew) else step
            for step in script
        )
        for script in scripts
    )


def _script(rand: random.Random, trainer: int, *, renews: bool, rests: bool) -> tuple[Step, ...]:
    steps: list[Step] = []
    for place in range(rand.randint(1, 3)):
        if renews and rand.random() < 0.8:
            steps.append(Renew(rand.random() < 0.3, rand.choice(("finish", "finish", "finish", "abort"))))
        roll = _roll(rand, f"r{trainer}.{place}", place, pinned=rand.random() < (0.8 if renews else 0.3))
        if renews and rand.random() < 0.3:
            roll = replace(roll, aside=True, ahead=rand.choice((0, 0, 1)))
        steps.append(roll)
        if rand.random() < 0.3:  # the same id again, with other noise
            brief = {rand.choice(("deadline", "cancel")): rand.choice((0.05, 0.3, 1.0))}
            steps[-1] = replace(roll, aside=False, ahead=0, **brief)  # type: ignore[arg-type]
            steps.append(replace(roll, seed=roll.seed + 1, aside=False, ahead=0))
        if rests:
            steps.append(Rest(rand.choice((0.2, 2.0))))
        if rand.random() < 0.2:
            steps.append(Pause(rand.choice((0.1, 1.0))))
    if any(isinstance(step, Roll) and step.ahead for step in steps):
        steps.append(Renew(False, "finish"))
    return tuple(steps)


def _roll(rand: random.Random, rollout_id: str, number: int, *, pinned: bool) -> Roll:
    return Roll(
        rollout_id=rollout_id,
        number=number,
        seed=rand.choice((0, 7)),
        prompts=tuple((f"p{each}", rand.randint(1, 20)) for each in range(rand.randint(1, 4))),
        n=rand.randint(1, 4),
        max_tokens=rand.choice((8, 40, 64)),
        pinned=pinned,
    )


def _in_parts(rand: random.Random, scripts: tuple[tuple[Step, ...], ...]) -> tuple[tuple[Step, ...], ...]:
    """Have some rollouts asked for in parts."""
    return tuple(tuple(_maybe_in_parts(rand, step) for step in script) for script in scripts)


def _maybe_in_parts(rand: random.Random, step: Step) -> Step:
    if not isinstance(step, Roll) or rand.random() > 0.4 or ODD & dict(step.prompts).keys():
        return step
    parts = InParts(
        size=rand.choice((1, 1, 2, step.n)),
        late=rand.choice((0.0, 0.0, 0.2, 2.0)),
        feint=rand.choice((None, None, 0.0, 0.05, 0.5)),
        stream=rand.random() < 0.6,
        prefix=rand.choice(("", "", "/", "/once more ")),
    )
    return replace(step, parts=parts, cancel=step.cancel or step.deadline, deadline=None)


def _in_turns(rand: random.Random, scripts: tuple[tuple[Step, ...], ...]) -> tuple[tuple[Step, ...], ...]:
    """Have some rollouts run in turns."""
    return tuple(tuple(_maybe_in_turns(rand, step) for step in script) for script in scripts)


def _maybe_in_turns(rand: random.Random, step: Step) -> Step:
    if not isinstance(step, Roll) or rand.random() > 0.3 or step.shared or step.ahead:
        return step
    if ODD & dict(step.prompts).keys():
        return step
    longest = rand.choice((0.0, 0.5, 3.0, 3.0, 30.0))
    turns = InTurns(
        waits=tuple(rand.uniform(0.0, longest) for _ in range(rand.choice((0, 1, 2, 4)))),
        idle_seconds=rand.choice((1.0, 10.0, 60.0)),
        room=rand.choice((10, 60, 1000)),
        most_open=rand.choice((1, 4, 256)),
        resent=rand.random() < 0.35,
        rewritten=rand.choice(((), (0,), (1, 2))),
    )
    max_tokens = min(step.max_tokens, 24)
    cancel = step.cancel or step.deadline
    return replace(step, turns=turns, parts=None, cancel=cancel, deadline=None, max_tokens=max_tokens)


def _with_images(rand: random.Random, plan: Plan) -> tuple[Plan, tuple[Fault, ...], tuple[Catch, ...]]:
    """Have some rollouts show images; also draw what befalls these."""
    names = sorted({step.rollout_id for step in plan.rolls})
    images = {name: rand.choice((1, 1, 2, 3)) for name in names if rand.random() < 0.3}
    if not images:
        return plan, (), ()
    scripts = tuple(tuple(_showing(step, images) for step in script) for script in plan.scripts)
    spoilt = [
        Fault(rand.uniform(0.0, 4.0), "spoil images", "buffer", 0.0)
        for _ in range(rand.choice((0, 0, 0, 1, 2)))
    ]
    # Little room is for prompts alone: trajectories that show more and more could refuse each other for ever.
    alone = not any(
        step.images and step.turns for script in scripts for step in script if isinstance(step, Roll)
    )
    plan = replace(
        plan,
        scripts=scripts,
        image_bytes=rand.choice((0, 2**13, 2**14)) if alone else 0,
        header_bytes=max(plan.header_bytes, 2**13),  # names of images are long
    )
    return plan, tuple(spoilt), _catches_among(rand, lambda way: way[2] in IMAGES)


def _showing(step: Step, images: dict[str, int]) -> Step:
    """Give a rollout its images; loops that send whole contexts have none."""
    if not isinstance(step, Roll) or (step.turns is not None and step.turns.resent):
        return step
    return replace(step, images=images.get(step.rollout_id, 0))


def _with_odd(scripts: tuple[tuple[Step, ...], ...], name: str) -> tuple[tuple[Step, ...], ...]:
    """Give the last rollout of the first trainer one of the `ODD` prompts."""
    steps = list(scripts[0])
    last = max(place for place, step in enumerate(steps) if isinstance(step, Roll))
    roll = steps[last]
    assert isinstance(roll, Roll)
    steps[last] = replace(roll, prompts=(*roll.prompts, (name, 3)), n=min(roll.n, 2), shared=False)
    return (tuple(steps), *scripts[1:])
