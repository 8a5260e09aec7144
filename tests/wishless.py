"""A sleep machine whose instructions leave out the numbers of wishes, for tests of all else."""

from msgspec.structs import replace

from seer.services.buffer import sleep


class SleepMachine(sleep.SleepMachine):
    def apply(self, *args, **options):
        out = super().apply(*args, **options)
        return [item if isinstance(item, sleep.GiveUp) else replace(item, wish=0) for item in out]
