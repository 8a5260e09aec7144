"""The real engine: vLLM V1 with Seer's sampler. The only package that imports torch and vllm."""
