"""Accuracy with its uncertainty: generation cache, grading, estimators, intervals and tests (no engine here)."""
