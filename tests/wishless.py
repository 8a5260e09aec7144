"""A sleep machine whose instructions leave out the numbers of wishes, for tests of all else."""

from seer.services.buffer import sleep


class SleepMachine(sleep.SleepMachine):
    def apply(self, *args, **options):
        out = super().apply(*args, **options)
        for item in out:
            if not isinstance(item, sleep.GiveUp):
                item.message.wish = 0
        return out
