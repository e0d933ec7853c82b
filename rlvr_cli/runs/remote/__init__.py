"""Copies of runs in object storage: the store itself (`store`), what a copy consists of (`index`), to and fro (`copies`)."""
