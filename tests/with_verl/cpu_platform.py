"""Lets veRL 0.9 train on CPUs: it has platforms for accelerators only. Loaded by VERL_USE_EXTERNAL_MODULES.

veRL's workers each take one `GPU` of Ray's, which `ray.init` is told to have.
"""

import contextlib
import types

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

MEMORY = 2**34

device = types.ModuleType("cpu_device")
vars(device).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
vars(device).update(
    {name: lambda *_, **__: None for name in ("reset_peak_memory_stats", "empty_cache", "ipc_collect")}
    | {f"{when}memory_{what}": lambda *_: 0 for when in ("", "max_") for what in ("allocated", "reserved")}
)
device.synchronize = device.set_device = lambda *_: None
device.mem_get_info = lambda *_: (MEMORY, MEMORY)
device.is_available = lambda: True
device.device_count = lambda: 1
device.current_device = lambda: torch.device("cpu")
device.get_device_name = lambda *_: "cpu"
device.get_device_properties = lambda *_: types.SimpleNamespace(name="cpu", total_memory=MEMORY)
device.get_rng_state, device.set_rng_state = torch.get_rng_state, torch.set_rng_state
device.manual_seed = device.manual_seed_all = torch.manual_seed


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = device

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return False

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_device(self, *_):
        pass

    synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = set_device

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def ray_resource_options(self, num):
        return {"num_gpus": num}

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


init = torch.distributed.init_process_group


def init_process_group(backend=None, *args, **options):
    """veRL asks for `cpu:gloo,<device>:<backend>`, which here names the CPU twice."""
    return init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **options)


torch.distributed.init_process_group = init_process_group
