"""The toy: a tiny Qwen3-MoE with its tokenizer, supervised warm-up and injected outlier channels."""
