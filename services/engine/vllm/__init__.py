"""The real engine: vLLM with Seer's sampler. The only package that imports torch and vllm."""
