"""The protocol version.

MAJOR changes when an old peer could misread a new message; peers of different majors refuse each
other. MINOR changes with every backward-compatible addition.
"""

from __future__ import annotations

MAJOR = 3
MINOR = 14
