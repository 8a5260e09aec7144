"""Plants a fault in processes that Python starts with this folder on PYTHONPATH.

SEER_PLANTED is a file with the fault's name, read again whenever it matters; SEER_PLANTED_IN says where: `engines`
alone, or `all` (the teacher of `seer verify`, too).
"""

import os
import sys

if os.environ.get("SEER_PLANTED") and (
    os.environ.get("SEER_PLANTED_IN") == "all" or "engine" in sys.orig_argv
):
    import faults

    faults.install(faults.named_in(os.environ["SEER_PLANTED"]))
