"""What is said of a process that ended."""

import pytest

from seer.common.process.children import how_ended


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (0, "ended with exit code 0"),
        (-9, "was killed by SIGKILL"),
        (-35, "was killed by signal 35"),
    ],
)
def test_a_signal_without_a_name_is_told_by_its_number(code: int, how: str):
    assert how_ended(code) == how
