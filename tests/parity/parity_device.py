"""Where the parity tests run: "cuda" if this vLLM is a GPU build and torch sees a GPU, else "cpu"."""

import importlib.metadata

import torch


def device() -> str:
    """The device of engines and trainer models."""
    return "cuda" if "cpu" not in importlib.metadata.version("vllm") and torch.cuda.is_available() else "cpu"
