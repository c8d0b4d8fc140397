"""A causal language model and its KV cache on one device: specs, loading, runtimes."""
