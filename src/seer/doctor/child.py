"""Checks that share a process: `python -m seer.doctor.child PARENT FD CONFIG CHECKS`, CHECKS as JSON.

Their lines go to the file descriptor FD. What they print besides is kept for the case that one crashes. A
check is left to the caller if the one it needs has failed here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

from seer.common.process.children import die_with
from seer.common.process.extras import ENGINE_FIX, ENGINE_PACKAGES
from seer.doctor.report_lines import ENDED, Report


def main() -> None:
    """Run the checks that the command line names, one after the other."""
    parent, fd, config, checks = sys.argv[1:]
    die_with(int(parent))
    os.set_inheritable(int(fd), False)  # else their own children would keep the pipe open
    failed: set[str] = set()
    with os.fdopen(int(fd), "w") as to:
        for check in json.loads(checks):
            if check["needs"] in failed:
                break
            report = Report(check["name"], to, config)
            begun = time.monotonic()
            _run(check["function"], report)
            report.note(ENDED, seconds=round(time.monotonic() - begun, 1))
            if report.failed:
                failed.add(check["name"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries would be waited for


def _run(function: str, report: Report) -> None:
    module, _, attribute = function.partition(":")
    try:
        getattr(importlib.import_module(module), attribute)(report)
    except ModuleNotFoundError as error:
        needed = error.name in ENGINE_PACKAGES
        text = f"not checked: {error.name} is not installed" + (", which engines need" if needed else "")
        report.expect(False, text, ENGINE_FIX if needed else f"pip install {error.name}")


if __name__ == "__main__":
    main()
