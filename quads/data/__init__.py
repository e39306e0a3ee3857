"""Problems, their answers and the parquet files made of them (numpy only, no torch)."""
