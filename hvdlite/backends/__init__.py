"""Backends: what moves bytes between ranks.  The contract is in `base.py`."""
