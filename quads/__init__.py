"""QUADS reproduced: NVFP4 reinforcement learning for MoE models, from data to tables.

Dependencies point one way: numerics <- kernels <- layers <- trainer, and kernels <- rollout; trainer and rollout
never import each other; only quads.integrations touches verl, vLLM and MLflow; quads.config, quads.rewards and
quads.paper import no torch (tests/test_imports.py enforces all of it).
"""

__version__ = "0.1.0"
