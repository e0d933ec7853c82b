"""Trackers (W&B, TensorBoard, Trackio) get a run's committed metrics, without training ever waiting for them.

The committed rows are the truth: a tracker is sent what metrics.parquet says, in the order of `rows.complete_rows`, by a process
of its own that follows the run (`children`, `follow`), or later by `rlvr export`. One module for each tracker.
"""
