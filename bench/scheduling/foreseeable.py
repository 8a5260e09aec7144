"""What no evidence in the tokens goes beyond: how well a response's beginning determines its length.

Has the beginnings of recorded responses gone on from anew, with other noise. The mean log of what came then
estimates what could be expected; what that and the response's real length share is what both had from the
beginning, so chance in the estimate does not count. `left` and `length`: the best possible correlation with
how far the log of what remains, or of the whole, is from the mean of the group's that still run, as in
`evidence.py`. Prints JSON. Prompts with images cannot be gone on from.

    python bench/scheduling/foreseeable.py OUT --after 64 --begin PROMPTS
    seer rollout PROMPTS --model MODEL -n 8 --max-tokens 960 --seed 7 --out AGAIN
    python bench/scheduling/foreseeable.py OUT --after 64 --again AGAIN --model MODEL --until ! ans
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lib.hardware import machine
from lib.held_out import centred, foreseeable, told

Rows = list[dict[str, Any]]


def begun(groups: Rows, point: int, until: Container[int]) -> Iterator[tuple[int, str, list[int]]]:
    """Yield group, name and tokens of responses that still run at a point and have none of `until` yet."""
    for number, group in enumerate(groups):
        for index, tokens in enumerate(each["token_ids"] for each in group["responses"]):
            if len(tokens) > point and not any(token in until for token in tokens[:point]):
                yield number, f"{group['id']}#{index}", tokens


def ceiling(groups: Rows, again: Rows, point: int, until: Container[int]) -> dict[str, Any]:
    """Return the correlations of what could be expected."""
    other = {row["id"]: np.array([len(each["token_ids"]) for each in row["responses"]]) for row in again}
    rows = [row for row in begun(groups, point, until) if row[1] in other]
    group = np.array([number for number, _, _ in rows])
    found = []
    for before in (0, point):
        expected = np.array([np.log(other[name] + before).mean() for _, name, _ in rows])
        real = np.log([len(tokens) - point + before for _, _, tokens in rows])
        found.append(foreseeable(centred(expected, group), centred(real, group), group))
    return {"responses": len(rows), **told(("left", "length"), np.array(found))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="OUT of a rollout")
    parser.add_argument("--after", type=int, required=True, metavar="TOKENS")
    parser.add_argument("--begin", type=Path, metavar="PROMPTS", help="write the beginnings")
    parser.add_argument("--prompts", type=int, default=64, help="of so many prompts")
    parser.add_argument("--again", type=Path, help="OUT of their rollout")
    parser.add_argument("--model", type=Path, help="whose tokens `--until` names")
    parser.add_argument("--until", nargs="*", default=[], help="leave out responses that have one of these")
    options = parser.parse_args()
    groups = [json.loads(line) for line in options.out.read_text().splitlines()]
    if options.begin:
        lines = (
            {"id": name, "prompt_token_ids": groups[number]["prompt_token_ids"] + tokens[: options.after]}
            for number, name, tokens in begun(groups[: options.prompts], options.after, ())
        )
        options.begin.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    until = set()
    if options.until:
        from transformers import AutoTokenizer

        until = set(AutoTokenizer.from_pretrained(options.model).convert_tokens_to_ids(options.until))
    again = [json.loads(line) for line in options.again.read_text().splitlines()]
    report = {"machine": machine("numpy"), "out": options.out.name, "after": options.after}
    print(
        json.dumps(report | {"until": options.until} | ceiling(groups, again, options.after, until), indent=1)
    )


if __name__ == "__main__":
    main()
