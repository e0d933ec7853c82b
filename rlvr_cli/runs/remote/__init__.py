"""Runs in object storage: the store (`store`), what a run is there (`index`), to and fro (`copies`), read (`views`), written (`behind`)."""
