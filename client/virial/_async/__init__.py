"""The asynchronous client; the synchronous one in `virial._sync` is generated from it by `tools/unasync_client.py`."""
