"""Measure the group tree against arctic-inference's suffix tree, in one process, turn by turn; print JSON.

    python bench/drafts/group_tree.py [--rounds 5] [--responses RUN/responses.jsonl] [--peer DIR]

The peer goes into a virtual environment of its own (`--peer`, default build/arctic; building it takes
minutes) and is imported from there. `ratio` is how many times better ours is; times are medians over the
rounds of what each round measured, append times and stalls of CPU time of the thread.

Tokens are those of bench/drafts/grouped_tokens.py, or recorded ones: the output of `seer rollout`.
Acceptance is simulated: a step drafts, takes the longest path that the response follows, and one token
more. At `equal_drafts` our min_score is set such that both draft alike per step. `tuned` is the peer's
setting that is best for it where verifying a drafted token costs 5 % of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grouped_tokens
import numpy as np
from lib.hardware import machine
from numpy.typing import NDArray

from seer._native import DraftStep, GroupTree, StepDrafter

PEER = "arctic-inference==0.3.0"
PEER_DEPTH = 64
DEPTH = 8
FLUSH = 64  # tokens of an append
SIBLINGS = (0, 1, 5, 15)
UNBOUNDED = (8.0, 8.0, 0.0)  # max_spec_factor, max_spec_offset, min_token_prob
DEFAULT = (1.0, 0.0, 0.1)  # as vLLM's
SETTINGS = (DEFAULT, (1.0, 0.0, 0.0), (2.0, 0.0, 0.1), (2.0, 0.0, 0.0), (4.0, 0.0, 0.1), (4.0, 0.0, 0.0))
GREEDY = ((8.0, 8.0, 0.1), UNBOUNDED)
VERIFY_COST = 0.05  # of a step, for each drafted token

Tokens = NDArray[np.int32]
Drafted = tuple[Sequence[int], Sequence[int]]
NewTree = Callable[[int], Any]


def import_peer(folder: Path) -> NewTree:
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True, stdout=sys.stderr)
    where = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        check=True,
        capture_output=True,
        text=True,
    )
    sys.path.append(where.stdout.strip())  # last: everything else is ours
    from arctic_inference.suffix_decoding._C import SuffixTree

    return SuffixTree


def recorded_groups(path: Path) -> list[list[Tokens]]:
    groups = []
    for line in path.read_text().splitlines():
        responses = json.loads(line)["responses"]
        groups.append([np.array(response["token_ids"], dtype=np.int32) for response in responses])
    return groups


def interleaved(group: Sequence[Tokens]) -> list[tuple[int, int, Tokens]]:
    """Return (request, previous, tokens) of a group's responses as they grow side by side."""
    longest = max((len(response) for response in group), default=0)
    return [
        (i, at, response[at : at + FLUSH])
        for at in range(0, longest, FLUSH)
        for i, response in enumerate(group)
        if at < len(response)
    ]


# --- acceptance ------------------------------------------------------------------------------


class Ours:
    """A group tree behind the interface that the simulation and the timings use."""

    def __init__(self, paths: int = 1, min_score: float = 0.0) -> None:
        self.tree, self.paths, self.min_score = GroupTree(), paths, min_score

    def append(self, request: int, previous: int, tokens: Tokens) -> None:
        """Add what follows a request's first `previous` tokens."""
        self.tree.append(request, previous, tokens)

    def draft(self, request: int, _context: Tokens) -> Drafted:
        """Draft DEPTH tokens on each path."""
        made = self.tree.draft(request, DEPTH * self.paths, self.paths, self.min_score, DEPTH)
        return made.token_ids, made.parents


class Peer:
    """The peer's tree behind the same interface; a setting is its factor, offset and least probability."""

    def __init__(self, kind: NewTree, setting: tuple[float, float, float]) -> None:
        self.tree, self.setting = kind(PEER_DEPTH), setting

    def append(self, request: int, _previous: int, tokens: Tokens) -> None:
        """Add a request's next tokens."""
        self.tree.extend_ndarray(request, tokens)

    def draft(self, _request: int, context: Tokens) -> Drafted:
        """Draft DEPTH tokens after a context."""
        made = self.tree.speculate_ndarray(context[-PEER_DEPTH:], DEPTH, *self.setting, False)
        return made.token_ids, made.parents


def accepted(drafted: Drafted, rest: Tokens) -> int:
    tokens, parents = drafted
    node, length = -1, 0
    for i, parent in enumerate(parents):  # parents come before their children
        if parent == node and length < len(rest) and tokens[i] == rest[length]:
            node, length = i, length + 1
    return length


def simulate(
    groups: list[list[Tokens]], siblings: int, make: Callable[[], Ours | Peer]
) -> tuple[float, float]:
    """Return tokens and drafted tokens per step of each group's last response."""
    tokens = steps = drafts = 0
    for group in groups:
        drafter, response = make(), group[-1]
        for item in interleaved(group[:siblings]):
            drafter.append(*item)
        drafter.append(len(group), 0, response[:1])
        at = 1
        while at < len(response):
            drafted = drafter.draft(len(group), response[max(0, at - PEER_DEPTH) : at])
            end = min(len(response), at + accepted(drafted, response[at:]) + 1)
            drafter.append(len(group), at, response[at:end])
            at, steps, drafts = end, steps + 1, drafts + len(drafted[0])
        tokens += len(response) - 1
    return tokens / max(1, steps), drafts / max(1, steps)


def at_equal_drafts(groups: list[list[Tokens]], siblings: int, drafts: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(9):
        middle = (low + high) / 2
        more = simulate(groups, siblings, lambda score=middle: Ours(1, score))[1] > drafts
        low, high = (middle, high) if more else (low, middle)
    return simulate(groups, siblings, lambda: Ours(1, high))[0]


def acceptance(groups: list[list[Tokens]], kind: NewTree) -> dict[str, Any]:
    most = len(groups[0]) - 1
    table: dict[str, Any] = {}
    for siblings in [n for n in SIBLINGS if n <= most]:
        line = {f"{k}_paths": simulate(groups, siblings, lambda k=k: Ours(k))[0] for k in (1, 2, 4)}
        line["peer_1_path"] = simulate(groups, siblings, lambda: Peer(kind, UNBOUNDED))[0]
        table[f"{siblings}_siblings"] = {name: round(value, 3) for name, value in line.items()}
    equal = {}
    for setting in SETTINGS + GREEDY:
        theirs, drafts = simulate(groups, most, lambda setting=setting: Peer(kind, setting))
        ours = at_equal_drafts(groups, most, drafts)
        worth = theirs / (1 + VERIFY_COST * drafts)
        equal[setting] = {
            "drafted": drafts,
            "ours": ours,
            "peer": theirs,
            "ratio": ours / theirs,
            "worth": worth,
        }
    tuned = max(equal, key=lambda setting: equal[setting]["worth"])
    return {
        "tokens_per_step": table,
        "equal_drafts": {str(setting): rounded(line) for setting, line in equal.items()},
        "default_ratio": round(equal[DEFAULT]["ratio"], 4),
        "tuned_ratio": round(equal[tuned]["ratio"], 4),
        "tuned": str(tuned),
    }


# --- time and memory -------------------------------------------------------------------------


def rounded(line: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in line.items()}


def append_rate(drafter: Ours | Peer, items: list[tuple[int, int, Tokens]]) -> float:
    """Return tokens per CPU second."""
    start = time.thread_time()
    for item in items:
        drafter.append(*item)
    return sum(len(tokens) for *_, tokens in items) / (time.thread_time() - start)


def longest_append_ms(drafter: Ours | Peer, items: list[tuple[int, int, Tokens]]) -> float:
    longest = 0
    for item in items:
        start = time.thread_time_ns()
        drafter.append(*item)
        longest = max(longest, time.thread_time_ns() - start)
    return longest / 1e6


def drop_ms(drafter: Ours | Peer) -> float:
    start = time.perf_counter_ns()
    del drafter.tree
    return (time.perf_counter_ns() - start) / 1e6


def draft_us(
    drafter: Ours | Peer, reader: Tokens, request: int, most: int, tree: bool
) -> tuple[float, float]:
    """Return p50 and p99 of a call from Python that reads what was drafted, while `reader` is appended."""
    times = []
    for end in range(PEER_DEPTH, min(len(reader), 2064)):
        context = reader[end - PEER_DEPTH : end].copy()
        drafter.append(
            request, end - 1 if end > PEER_DEPTH else 0, context[-1:] if end > PEER_DEPTH else context
        )
        start = time.perf_counter_ns()
        if isinstance(drafter, Ours):
            made = drafter.tree.draft(request, most, 32 if tree else 1)
        else:
            made = drafter.tree.speculate_ndarray(context, most, *UNBOUNDED, tree)
        drafted = made.token_ids, made.parents
        times.append((time.perf_counter_ns() - start) / 1000)
        del drafted
    p50, p99 = np.percentile(times, [50, 99])
    return float(p50), float(p99)


def batch_us_per_request(tree: GroupTree, group: Sequence[Tokens], requests: int = 32) -> float:
    """Return what a draft of 8 costs in a step of `requests`, each with one token to append."""
    drafter, said, times = StepDrafter(requests), np.zeros(0, np.int32), []
    names = range(100, 100 + requests)
    generations = np.array([drafter.set(i, tree, name, -1, 0, said, 2**20) for i, name in enumerate(names)])
    drafts, scores = np.empty((requests, 8), np.int32), np.empty((requests, 8), np.float32)
    slots, one = np.arange(requests, dtype=np.int32), np.ones(requests, np.int32)
    counts = np.empty(requests, np.int32)
    for at in range(min(200, *map(len, group))):
        sampled = np.array([[group[i % len(group)][at]] for i in range(requests)], np.int32)
        step = DraftStep(drafter, slots, generations, sampled, one, drafts, counts, scores)
        start = time.perf_counter_ns()
        step.run()
        times.append((time.perf_counter_ns() - start) / 1000 / requests)
    return statistics.median(times)


def one_round(group: list[Tokens], reader: Tokens, kind: NewTree) -> dict[str, dict[str, float]]:
    """Fill a tree of each kind with `group`; draft along `reader`, a sibling that is not in it."""
    items = interleaved(group)
    ours, peer = Ours(), Peer(kind, UNBOUNDED)
    found = {"append_tokens_per_s": {"ours": append_rate(ours, items), "peer": append_rate(peer, items)}}
    for name, most, tree in (("path_of_8", 8, False), ("tree_of_32", 32, True)):
        for request, (who, drafter) in enumerate((("ours", ours), ("peer", peer)), 1000 + most):
            p50, p99 = draft_us(drafter, reader, request, most, tree)
            found.setdefault(f"{name}_p50_us", {})[who] = p50
            found.setdefault(f"{name}_p99_us", {})[who] = p99
    found["bytes_per_token"] = {
        "ours": ours.tree.bytes / ours.tree.tokens,
        "peer": peer.tree.estimate_memory() / ours.tree.tokens,
    }
    found["batch_of_32_us_per_request"] = {"ours": batch_us_per_request(ours.tree, group)}
    found["drop_ms"] = {"ours": drop_ms(ours), "peer": drop_ms(peer)}
    stalls = {
        "ours": longest_append_ms(Ours(), items),
        "peer": longest_append_ms(Peer(kind, UNBOUNDED), items),
    }
    return found | {"longest_append_ms": stalls}


def compare(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    report = {}
    for name in rounds[0]:
        line = {who: statistics.median(one[name][who] for one in rounds) for who in rounds[0][name]}
        if "peer" in line:
            better = line["ours"] / line["peer"]
            line["ratio"] = better if name.endswith("per_s") else 1 / better
        report[name] = rounded(line)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--responses", type=Path, help="measure acceptance on these, too")
    parser.add_argument("--peer", type=Path, default=Path("build/arctic"))
    parser.add_argument("--big", type=int, default=31_250, help="tokens of each of the 16 timed responses")
    parser.add_argument("--groups", type=int, default=4, help="groups of 16 x 6,000 tokens for acceptance")
    options = parser.parse_args()
    kind = import_peer(options.peer)
    language = grouped_tokens.Language()
    *big, reader = language.group(7, 17, options.big)
    report: dict[str, Any] = {"machine": machine("numpy"), "peer": PEER, "tokens": 16 * options.big}
    report["figures"] = compare([one_round(big, reader, kind) for _ in range(options.rounds)])
    report["empty_tree_bytes"] = GroupTree().bytes
    groups = [language.group(100 + seed, 16, 6000) for seed in range(options.groups)]
    report["acceptance"] = acceptance(groups, kind)
    if options.responses:
        report["acceptance_recorded"] = acceptance(recorded_groups(options.responses), kind)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
