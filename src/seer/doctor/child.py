"""One check, in a process of its own: `python -m seer.doctor.child NAME MODULE:FUNCTION FD`.

Its lines go to the file descriptor FD. What it prints besides is kept for the case that it crashes.
"""

from __future__ import annotations

import importlib
import os
import sys

from seer.doctor.lines import Report


def main() -> None:
    """Run the check that the command line names."""
    name, function, fd = sys.argv[1:]
    module, _, attribute = function.partition(":")
    os.set_inheritable(int(fd), False)  # else its own children would keep the pipe open
    with os.fdopen(int(fd), "w") as to:
        report = Report(name, to)
        try:
            check = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            report.expect(False, f"cannot be run: {error}", f"pip install {error.name}")
            return
        check(report)


if __name__ == "__main__":
    main()
