"""From fields of dataclasses to flags and TOML keys, and back to a config that knows where each value came from."""
