"""The synchronous client: `client.py` is generated from `virial._async`, `io.py` is written by hand."""
