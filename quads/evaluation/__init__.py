"""pass@1 with its uncertainty: per-sample records, unbiased estimators, bootstrap over problems (no engine here)."""
