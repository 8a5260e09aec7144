"""A sleep machine whose instructions leave out the numbers of wishes, for tests of all else."""

from seer.services.buffer import sleep_machine


class SleepMachine(sleep_machine.SleepMachine):
    def apply(self, *args, **options):
        out = super().apply(*args, **options)
        for item in out:
            if not isinstance(item, sleep_machine.GiveUp):
                item.message.wish = 0
        return out
