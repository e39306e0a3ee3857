"""Adapters to verl 0.9.1: overrides, CPU platform, QAT engine, trainer, agent loop, weight sync.

Every adapter is a subclass, a registry entry or a config key that verl offers; the exceptions are
listed, with their reasons, in compat.py.
"""
