"""`seer spans`: what a buffer's log says as spans of OpenTelemetry."""
