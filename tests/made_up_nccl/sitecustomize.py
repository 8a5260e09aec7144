"""Installs the made-up NCCL in processes that Python starts with this folder on PYTHONPATH, once vLLM needs one."""

import importlib.machinery
from types import ModuleType

NEEDS_ONE = "vllm.distributed.weight_transfer.nccl_engine"

_execute = importlib.machinery.SourceFileLoader.exec_module


def execute(self: importlib.machinery.SourceFileLoader, module: ModuleType) -> None:
    _execute(self, module)
    if module.__name__ == NEEDS_ONE:
        import made_up_nccl

        made_up_nccl.install()


importlib.machinery.SourceFileLoader.exec_module = execute
