"""A pytest plugin that imports one module with a mutant in it: `SEER_MUTANT=room/overtakes pytest -p mutants.plugin`.

Nothing is written: the module's tree is changed between reading and compiling, in this process alone. A run
that never imports the module ends in an error, as it says nothing about the mutant.
"""

from __future__ import annotations

import os
import resource
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

from mutants import load, mutated

MEMORY_BYTES = 6 * 2**30
"""What a mutant that never stops may take of this machine."""

_list, _, _name = os.environ["SEER_MUTANT"].partition("/")
_all = load(_list)
_mutant = next(mutant for mutant in _all.mutants if mutant.name == _name)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(Path(self.path).read_text(), _mutant), self.path, "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != _all.module:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                spec.loader = _Loader(fullname, str(spec.origin))
                return spec
        return None


resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
if _all.module in sys.modules:
    raise RuntimeError(f"{_all.module} was imported before it could be changed")
sys.meta_path.insert(0, _Finder())


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """End a run that cannot say anything."""
    if _all.module not in sys.modules:
        pytest.exit(f"no test imports {_all.module}", returncode=4)
