"""The buffer's log: what its machines were told and answered, by rows, for replay, reports and comparison."""
