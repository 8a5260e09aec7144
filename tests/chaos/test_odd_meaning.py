"""A fixed part of the fuzzing by odd messages; `python tests/chaos/odd_meaning.py --runs N --seed S` does more."""

from collections import Counter

from chaos.odd_meaning import play
from seer.common import wire

SEEDS = range(8)


def test_messages_that_make_no_sense_harm_nobody():
    types: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for seed in SEEDS:
        world = play(seed)
        assert not world.problems, f"seed {seed}: {world.problems[0]}"
        types, answers = types + world.types, answers + world.answers
    for union in (wire.TrainerToBuffer, wire.EngineToDgds, wire.SnapshotAsked):
        assert {cls.__name__ for cls in union.__args__} <= types.keys()
    # It gets beyond the first checks.
    for cls in wire.BufferToTrainer.__args__:
        assert cls is wire.Refused or answers[cls.__name__] or cls is wire.WeightsLoading, cls
    assert answers["honest rollouts"] > 5 * len(SEEDS)
