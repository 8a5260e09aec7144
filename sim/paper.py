"""The paper's measurements, to print beside simulated ones (arXiv 2511.14617 v3).

Only the two times of `static` were used to fit the simulator, and none of the other figures.
"""

from __future__ import annotations

import msgspec

from seer.sim.study import BASELINE, Variant
from seer.sim.workload import Workload


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The paper's figures of one variant: seconds; throughput and tail relative to the baseline's."""

    total: float | None = None
    tail: float | None = None
    speedup: float | None = None
    tail_ratio: float | None = None


GROUP_SIZES = {"moonlight": 8, "qwen2-vl-72b": 16, "kimi-k2": 8}
"""Responses per prompt in the published iterations."""

_SEER = Variant("seer-paper", drafts=True)

_FIGURES: dict[str, dict[Variant, Figures]] = {
    "moonlight": {
        BASELINE: Figures(total=3910, tail=1817),
        Variant("static", drafts=True): Figures(speedup=1.26),
        Variant("divided"): Figures(speedup=1.41),
        Variant("seer-paper"): Figures(speedup=1.47),
        _SEER: Figures(total=2181, tail=278, speedup=1.90, tail_ratio=278 / 1817),
    },
    "qwen2-vl-72b": {
        BASELINE: Figures(total=3957, tail=2301),
        Variant("static", drafts=True): Figures(speedup=1.38),
        Variant("divided"): Figures(speedup=1.42, tail_ratio=0.79),
        Variant("seer-paper"): Figures(speedup=1.56, tail_ratio=0.11),
        Variant("oracle"): Figures(speedup=1.63, tail_ratio=0.0),
        _SEER: Figures(total=1922, tail=123, speedup=2.04, tail_ratio=123 / 2301),
    },
    "kimi-k2": {
        BASELINE: Figures(total=12202, tail=3144),
        Variant("static", drafts=True): Figures(speedup=1.25),
        Variant("divided"): Figures(speedup=1.16),
        Variant("seer-paper"): Figures(speedup=1.27),
        _SEER: Figures(total=8267, tail=850, speedup=1.53, tail_ratio=850 / 3144),
    },
}
"""Totals and tails over iterations; ratios of the ablation and the scheduler study, one iteration."""

_BY_GROUP_SIZE = {
    "moonlight": {8: 1.78, 16: 1.83},
    "qwen2-vl-72b": {8: 1.82, 16: 2.04},
    "kimi-k2": {8: 1.48, 16: 1.44},
}
"""Speedup of the paper's complete Seer, by responses per prompt."""


def figures(load: Workload, variant: Variant) -> Figures:
    """Return the paper's figures of a variant on a workload; all None if there are none."""
    if load.group_size == GROUP_SIZES.get(load.name):
        return _FIGURES[load.name].get(variant, Figures())
    if variant == _SEER:
        return Figures(speedup=_BY_GROUP_SIZE.get(load.name, {}).get(load.group_size))
    return Figures()
