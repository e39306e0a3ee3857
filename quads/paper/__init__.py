"""From result files to the table, the figures and the comparison with the paper (no torch)."""
