"""Weights as trainers, buffer and engines exchange them: digests, safetensors files, Mooncake."""
