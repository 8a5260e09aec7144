"""What it costs the buffer's machine to lose all of 500 engines with 96,000 requests, and to get them back.

Lost `at_once`, as after a cut switch, in one event; and `one_by_one`, as its peer. They come back one by one;
`longest` is the longest single event, in which nothing else is handled. Processor time, in seconds, medians
of `--turns`. Prints JSON.

    python bench/services/fleet_loss.py
    python bench/services/fleet_loss.py --engines 50 --requests 9600
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from decisions import REGISTER, Fleet
from lib.hardware import machine

from seer.services.buffer.events import Joined, Left


def turn(policy: str, requests: int, engines: int) -> dict[str, float]:
    """Lose all engines in both ways, and get them back each time."""
    fleet = Fleet(policy, requests, engines)
    names = [f"engine-{number}" for number in range(engines)]
    figures = {}
    ways = {
        "at_once": [Left(names)],
        "one_by_one": [Left([name]) for name in names],
    }
    for way, losses in ways.items():
        running = len(fleet.running)
        lost = [fleet.told(event)[0] for event in losses]
        if fleet.machine.instances:
            raise RuntimeError(f"{len(fleet.machine.instances)} engines are left")
        fleet.running.clear()
        back = [fleet.told(Joined(name, REGISTER))[0] for name in names]
        figures |= {f"lost_{way}": sum(lost), f"lost_{way}_longest": max(lost)}
        figures |= {f"back_after_{way}": sum(back), f"back_after_{way}_longest": max(back)}
        figures |= {f"chunks_lost_{way}": running, f"chunks_back_{way}": len(fleet.running)}
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="seer")
    parser.add_argument("--engines", type=int, default=500)
    parser.add_argument("--requests", type=int, default=96_000)
    parser.add_argument("--turns", type=int, default=3)
    asked = parser.parse_args()
    turns = [turn(asked.policy, asked.requests, asked.engines) for _ in range(asked.turns)]
    medians = {name: round(statistics.median(each[name] for each in turns), 4) for name in turns[0]}
    ratio = round(statistics.median(each["lost_one_by_one"] / each["lost_at_once"] for each in turns), 2)
    json.dump(
        {"machine": machine(), **vars(asked), **medians, "one_by_one_over_at_once": ratio},
        sys.stdout,
        indent=1,
    )
    print()


if __name__ == "__main__":
    main()
