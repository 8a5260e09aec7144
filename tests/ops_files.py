"""The files of ops/, and Prometheus's programs."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
OPS = REPO / "ops"


def tool(name):
    """The path of `prometheus` or `promtool`; None: there is none."""
    return shutil.which(name, path=f"{os.environ['PATH']}:{REPO / 'build/prometheus/usr/bin'}")


def promtool(*arguments):
    """What promtool says about files in ops/."""
    done = subprocess.run(
        [tool("promtool"), *arguments], cwd=OPS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Dashboard:
    """`ops/dashboard.py`."""

    def __init__(self):
        spec = importlib.util.spec_from_file_location("dashboard", OPS / "dashboard.py")
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def expressions(self, one, interval):
        """Expressions and legends, with Grafana's variables filled in."""
        for row in self.module.ROWS:
            for panel in row.panels:
                for line in panel.lines:
                    expression = line.expr.replace(self.module.ONE, one)
                    yield expression.replace("$__rate_interval", interval), line.legend

    def metrics(self):
        """The names of all metrics in it."""
        return {name for each, _ in self.expressions("", "1m") for name in re.findall(r"\bseer_\w+", each)}


def dashboard():
    return Dashboard()
