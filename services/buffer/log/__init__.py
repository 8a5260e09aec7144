"""The buffer's log, a row per event with its instructions, for replay and reports; and kept chunks."""
