"""SkyRL 0.3: `python -m seer.integrations.skyrl.main`, in place of SkyRL's `main_base`."""
