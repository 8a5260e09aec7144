"""What operators look at: `seer exporter`'s metrics and `seer top`'s screen."""
