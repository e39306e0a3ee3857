"""Adapters to verl 0.9.1: overrides, CPU platform, QAT engine, trainer, agent loop, weight sync.

Every adapter is a subclass, a registry entry or a config key that verl offers; nothing of verl is overwritten.
Keep this file free of imports: light Ray actors (router.py) import it.
"""
