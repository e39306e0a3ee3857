# SPDX-License-Identifier: Apache-2.0
"""Adapters: the only package that imports verl, vLLM or MLflow."""
