"""What a run consists of on disk: schemas, Parquet, keys, checksums, atomic files."""
