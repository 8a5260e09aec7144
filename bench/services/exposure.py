"""What `systemd-analyze security` counts for each unit: of a revision, of the tree, and with addresses.

The numbers are of 10, the lower the better; a service that is denied nothing has over 9. Nothing is started
or installed. Prints JSON. Needs systemd-analyze, and a git checkout for `--before`.

    python bench/services/exposure.py --before v0.2.0
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from lib.hardware import machine

REPO = Path(__file__).resolve().parents[2]
UNITS = Path("compose") / "systemd"
ADDRESSES = "[Service]\nIPAddressDeny=any\nIPAddressAllow=localhost 10.0.0.0/8\n"


def exposure(source: Path, *, addresses: bool) -> dict[str, float]:
    """Return the exposure of each unit in a folder, by its name."""
    found = {}
    for unit in sorted(source.glob("*.service")):
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            shutil.copytree(source, folder, dirs_exist_ok=True)
            name = unit.name.replace("@.", "@0.")
            (folder / name).write_text(unit.read_text().replace("/opt/seer/bin/seer", "/bin/true"))
            if addresses:
                (folder / "seer-.service.d" / "30-addresses.conf").write_text(ADDRESSES)
            answer = subprocess.run(
                ["systemd-analyze", "security", "--offline=true", str(folder / name)],
                capture_output=True, text=True, check=True, timeout=60,
                env={"SYSTEMD_UNIT_PATH": f"{folder}:", "PATH": "/usr/bin:/bin"},
            )  # fmt: skip
        (number,) = re.findall(r"Overall exposure level for \S+ ([\d.]+)", answer.stdout)
        found[unit.name] = float(number)
    return found


def revision(name: str, into: Path) -> Path:
    """Return the folder of the units as a revision has them."""
    archive = subprocess.run(
        ["git", "-C", str(REPO), "archive", name, str(UNITS)], capture_output=True, check=True, timeout=60
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(into, filter="data")
    return into / UNITS


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default="", metavar="REVISION", help="also the units of this revision")
    options = parser.parse_args()
    version = subprocess.run(
        ["systemd-analyze", "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()[0]
    report = {"machine": machine(), "systemd": version}
    if options.before:
        with tempfile.TemporaryDirectory() as folder:
            report["before"] = exposure(revision(options.before, Path(folder)), addresses=False)
    report["now"] = exposure(REPO / UNITS, addresses=False)
    report["with_addresses"] = exposure(REPO / UNITS, addresses=True)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
