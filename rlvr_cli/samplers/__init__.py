"""Inference engines behind `records.Sampler`: requests enter, completions leave. One module per engine."""
